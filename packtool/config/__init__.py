"""Settings of the commands: one file a command or group of options; ``settings`` declares, merges and checks."""
