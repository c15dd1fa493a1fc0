"""Configurations of ms-swift, LLaMA-Factory, axolotl and TRL: reading, translation into packtool's options, reports."""
