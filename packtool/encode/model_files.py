"""Files of a model that encoding reads: tokenizer, chat template, config and processor settings, but no weights.

They are read directly, because ``transformers.AutoTokenizer`` takes seconds and imports torch. Only tokenizers without
a ``tokenizer.json`` are converted by transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from packtool.config.data import MISTRAL_COMMON, EncodeSpec, set_kwargs
from packtool.config.settings import load_json
from packtool.encode.loss_scale import EMPTY_THINKING, loss_scale_of
from packtool.encode.template import TemplateFailure, ended_template, template_variables, template_variants
from packtool.errors import ConfigError, did_you_mean

_FETCH_AGAIN = "Download the model's files again."
# Files from which transformers can make a tokenizer if there is no tokenizer.json.
_OTHER_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
_MISTRAL_FILE = re.compile(r"tekken\.json|tokenizer\.model\.v\d+")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.model.v*"]
_QUESTION = {"role": "user", "content": "packtoolquestion"}
_THOUGHT = "packtoolthought"
_ANSWERS_WITH_THOUGHT = (
    {"role": "assistant", "content": "packtoolanswer", "reasoning_content": _THOUGHT},
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\npacktoolanswer"},
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model that determine how rows are encoded.

    Args:
        tokenizer_config: ``tokenizer_config.json``; empty if there is none.
        chat_template: the Jinja text; empty for a base model, which has none.
        processor: settings of the image processor; empty for text-only models.
        video_processor: settings of the video processor; those of the image processor if the model has no others.
        audio_processor: settings of the feature extractor for sound; empty if there is none.
        other_template: the template of ``--chat-template``, which replaces the model's own; "" for the model's own.
        chat_template_kwargs: arguments of the chat template in this run, from ``--chat-template-kwargs``.
        end_mark: text that was added to the chat template to end the last answer; "" if the template ends answers.
    """

    directory: str
    config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tokenizer_json: str
    chat_template: str
    processor: dict[str, Any]
    video_processor: dict[str, Any] = field(default_factory=dict)
    audio_processor: dict[str, Any] = field(default_factory=dict)
    other_template: str = ""
    end_mark: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls, model: str, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> ModelFiles:
        """Read a model's files; ConfigError if one is missing or invalid.

        Args:
            model: a directory, or a repository on the Hugging Face Hub, which is downloaded first.
            chat_template: value of ``--chat-template``: a file that replaces the model's own template.
            chat_template_kwargs: value of ``--chat-template-kwargs``: arguments of the template.
        """
        directory = model if os.path.isdir(model) else _download(model)
        tokenizer_config = _read_json(directory, "tokenizer_config.json") or {}
        config = _read_json(directory, "config.json")
        if config is None:
            remedy = "Give the directory of a transformers model."
            raise ConfigError(f"--model {model}: there is no config.json", remedy)

        other_template = "" if chat_template is None else read_template(chat_template, directory)
        main_file = "preprocessor_config.json"  # settings for pictures, and for sound
        video_file = "video_preprocessor_config.json"
        files = cls(
            directory=directory,
            config=config,
            tokenizer_config=tokenizer_config,
            tokenizer_json=_tokenizer_json(directory),
            chat_template=other_template or _own_template(directory, tokenizer_config),
            processor=_processor_settings(directory, "image_processor", main_file),
            video_processor=_processor_settings(directory, "video_processor", video_file, main_file),
            audio_processor=_processor_settings(directory, "feature_extractor", main_file),
            other_template=other_template,
        )

        # If the template does not end the last answer, it is extended by ``end_mark``, one of the stop tokens.
        template, end_mark = ended_template(files.chat_template, files.template_variables, files._stop_tokens)
        return replace(
            files, chat_template=template, end_mark=end_mark, chat_template_kwargs=set_kwargs(chat_template_kwargs)
        )

    @property
    def model_type(self) -> str:
        """``config.json``'s ``model_type``."""
        return str(self.config.get("model_type", ""))

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of vocabulary, merges, added tokens and pre-tokenization; independent of the file's layout."""
        try:
            parsed = load_json(self.tokenizer_json)
            model = parsed["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.directory}: tokenizer.json is invalid: {error!r}", _FETCH_AGAIN) from error
        vocabulary = model.get("vocab") or {}
        if isinstance(vocabulary, dict):
            vocabulary = sorted(vocabulary, key=vocabulary.__getitem__)
        # A merge is written as "a b" or as ["a", "b"].
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()]
        rest = {key: parsed.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "decoder")}
        rest["model"] = {key: model.get(key) for key in ("type", "byte_fallback", "unk_token")}
        return _digest("\n".join([*map(str, vocabulary), "", *merges, json.dumps(rest, sort_keys=True)]))

    @cached_property
    def template_hash(self) -> str:
        """Hash of the chat template."""
        return _digest(self.chat_template.rstrip("\n"))

    @cached_property
    def processor_hash(self) -> str:
        """Hash of the settings of all processors for media."""
        settings = [self.processor, self.video_processor, self.audio_processor]
        return _digest(json.dumps(settings, sort_keys=True))

    @property
    def template_variables(self) -> dict[str, Any]:
        """Arguments of the run, and special tokens by the name that templates know them by, such as ``bos_token``."""
        extra = self.tokenizer_config.get("extra_special_tokens")
        settings = {**self.tokenizer_config, **(extra if isinstance(extra, dict) else {})}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
        tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        return {**self.chat_template_kwargs, **tokens}

    @cached_property
    def is_hybrid_thinking(self) -> bool:
        """True if the template can switch thinking off: it then ends its prompt with an empty thinking block."""
        for template in template_variants(self.chat_template, self.template_variables):
            with suppress(TemplateFailure):
                on, off = (
                    template.render([_QUESTION], add_generation_prompt=True, thinks=thinks) for thinks in (True, False)
                )
                return on != off and re.search(rf"{EMPTY_THINKING}\Z", off) is not None
        return False

    @cached_property
    def drops_thinking(self) -> bool:
        """True if the chat template keeps the thinking of the last turn, but removes it once a question follows."""
        for template in template_variants(self.chat_template, self.template_variables):
            for answer in _ANSWERS_WITH_THOUGHT:
                with suppress(TemplateFailure):
                    num_last = template.render([_QUESTION, answer]).count(_THOUGHT)
                    if template.render([_QUESTION, answer] * 2).count(_THOUGHT) < 2 * num_last:
                        return True
        return False

    def option_warnings(self, spec: EncodeSpec) -> tuple[str, ...]:
        """Return warnings about what ``spec`` means for this model, one line each."""
        warnings: list[str] = []
        loss_scale = loss_scale_of(spec.loss_scale, self.is_hybrid_thinking)
        if loss_scale != spec.loss_scale:
            warnings.append(
                f"--loss-scale {spec.loss_scale} is applied as {loss_scale}: with thinking switched off, the "
                "generation prompt of this chat template already contains the empty thinking block, so the block is "
                f"not trained; --loss-scale {spec.loss_scale}+keep_empty_think trains it"
            )
        warnings += self._unknown_kwargs_warnings()
        if self.end_mark:
            warnings.append(
                "the chat template writes no end of turn after an answer, and generation stops at "
                f"{self.end_mark.strip()}, which opens the next turn: this token is added after the last answer, and "
                "trained as the end of each answer"
            )
        if spec.expand_turns == "auto" and self.drops_thinking:
            warnings.append(
                "--expand-turns auto: the chat template removes the thinking of earlier turns, so a row that would "
                "lose thinking becomes several samples"
            )
        elif spec.expand_turns == "auto":
            warnings.append(
                "--expand-turns auto changes nothing: the chat template keeps the thinking of earlier turns"
            )
        return tuple(warnings)

    def _unknown_kwargs_warnings(self) -> list[str]:
        """Return a warning for each of ``--chat-template-kwargs`` that the chat template does not read."""
        if not self.chat_template_kwargs:
            return []
        known_names = template_variables(self.chat_template)
        warnings = []
        for name in sorted(self.chat_template_kwargs.keys() - known_names):
            hint = did_you_mean(name, sorted(known_names))
            warnings.append(f"--chat-template-kwargs: the chat template does not use {name!r}{hint}")
        return warnings

    def _stop_tokens(self) -> tuple[str, ...]:
        stops = (_read_json(self.directory, "generation_config.json") or {}).get("eos_token_id")
        stops = stops if isinstance(stops, list) else [stops]
        try:
            added = load_json(self.tokenizer_json)["added_tokens"]
            return tuple(str(token["content"]) for token in added if token["id"] in stops)
        except (ValueError, KeyError, TypeError):  # an invalid tokenizer is reported where it is used
            return ()


def absolute_model(model: str) -> str:
    """Return a model's directory as an absolute path; names on the hub and remote addresses are returned unchanged."""
    return os.path.abspath(model) if os.path.isdir(model) else model


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _read_json(directory: str, name: str) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file, ConfigError if it is invalid."""
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return None
    try:
        value = load_json(_read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def _tokenizer_json(directory: str) -> str:
    """Return the text of ``tokenizer.json``; if it is missing, transformers makes it from other tokenizer files."""
    path = os.path.join(directory, "tokenizer.json")
    if os.path.exists(path):
        return _read_text(path)
    if not any(os.path.exists(os.path.join(directory, name)) for name in _OTHER_TOKENIZER_FILES):
        names = ", ".join(("tokenizer.json", *_OTHER_TOKENIZER_FILES))
        raise ConfigError(
            f"{directory} has no tokenizer: it contains none of {names}",
            "Copy the tokenizer's files from the model that this one was trained from, or save a tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...).",
        )
    return _converted_tokenizer(directory)


def _converted_tokenizer(directory: str) -> str:
    """Return the text of the ``tokenizer.json`` that transformers makes from other tokenizer files."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        return str(tokenizer.backend_tokenizer.to_str())
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"{directory}: there is no tokenizer.json, and transformers cannot make a fast tokenizer: {error}",
            "Save one with AutoTokenizer.from_pretrained(...).save_pretrained(...), or use a model that has one.",
        ) from error


def _own_template(directory: str, tokenizer_config: dict[str, Any]) -> str:
    """Return the model's chat template from the first file that has one; "" if none has."""
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.exists(path):
        return _read_text(path)
    template = (_read_json(directory, "chat_template.json") or tokenizer_config).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else ""


def read_template(path: str, directory: str) -> str:
    """Return the template of ``--chat-template path`` for the model in ``directory``; ConfigError if there is none."""
    if path == MISTRAL_COMMON:
        return _mistral_template(directory)
    try:
        text = _read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--chat-template {path} cannot be read: {reason}", "Give a .jinja file.") from error
    if not text.strip():
        raise ConfigError(f"--chat-template {path}: the file is empty", "Give a .jinja file with a chat template.")
    return text


def _processor_settings(directory: str, part: str, *names: str) -> dict[str, Any]:
    """Return the settings of a part of the processor from ``processor_config.json``, else the first of ``names``."""
    settings = (_read_json(directory, "processor_config.json") or {}).get(part)
    for name in names:
        settings = settings or _read_json(directory, name)
    return settings or {}


def _download(model: str) -> str:
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"--model {model}: there is no such directory")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise ConfigError(
            f"--model {model}: there is no such directory, and the download from the Hugging Face Hub failed: {error}",
            "Give a local directory, or check the name and the connection.",
        ) from error


def _mistral_template(directory: str) -> str:
    """Return mistral-common's chat template for the model's tokenizer file; it adds no default system prompt."""
    if not (files := sorted(name for name in os.listdir(directory) if _MISTRAL_FILE.fullmatch(name))):
        raise ConfigError(
            f"--chat-template {MISTRAL_COMMON}: {directory} has no tekken.json, nor tokenizer.model.v3 or the like",
            "Copy it from the model's repository, or remove the option to use the model's own template.",
        )
    try:
        from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

        return str(convert_tokenizer_to_chat_template(os.path.join(directory, files[0])))
    except Exception as error:  # for an invalid file the library raises a dozen unrelated types
        message = f"--chat-template {MISTRAL_COMMON}: {files[0]} in {directory} cannot be read: {error}"
        raise ConfigError(message, _FETCH_AGAIN) from error
