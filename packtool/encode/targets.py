"""Which tokens the model is trained to say: the assistant's turns with their end-of-turn token.

A turn's targets are what the model writes after the *generation prompt*, so they begin where that prompt ends and run
through the token that ends the turn. Turns are found by the control tokens that the template itself wrote, so the way
holds for templates that rewrite what earlier turns said (Qwen3 drops their ``<think>`` blocks) and needs no
``{% generation %}`` tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packtool.encode.control import ControlVocabulary, Piece, Shield
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.errors import ConfigError

_PROBE_QUESTION = "packtoolquestion"
_PROBE_ANSWER = "packtoolanswer"


@dataclass(frozen=True)
class TurnPieces:
    """Where one assistant turn lies in a cut conversation.

    Args:
        first: piece whose text begins with ``header``; targets start behind the header.
        header: text that the generation prompt already gives.
        last: piece whose control token ends the turn (itself a target), or ``len(pieces)`` if nothing ends it.
    """

    first: int
    header: str
    last: int


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant's turns of a template.

    Args:
        header: (control, text) pairs that open an assistant turn; the last text is a prefix of its piece's.
        prompt_rest: what the generation prompt writes behind the header (``<think>\\n`` for thinking models).
        end_of_turn: the control token that ends a turn.
    """

    header: tuple[tuple[str, str], ...]
    prompt_rest: str
    end_of_turn: str

    @classmethod
    def of(cls, template: ChatTemplate, vocabulary: ControlVocabulary) -> TurnFinder:
        """Learn from two small conversations how the template opens and ends an assistant turn.

        Raises:
            ConfigError: if it does so without control tokens: then nothing marks where a turn begins.
        """
        question = {"role": "user", "content": _PROBE_QUESTION}
        answer = {"role": "assistant", "content": _PROBE_ANSWER}
        try:
            asked = template.render([question])
            prompted = template.render([question], add_generation_prompt=True)
            answered = template.render([question, answer])
        except TemplateFailure as error:
            raise ConfigError(f"the chat template does not render a question and its answer: {error}") from error
        turn, inside = _answer_piece(answered, vocabulary)
        if inside is None or inside + 1 >= len(turn) or not turn[inside].control:
            raise _no_control_tokens()
        before = turn[inside].text.partition(_PROBE_ANSWER)[0]
        prompt = Shield(vocabulary, ()).cut(prompted[len(asked) :]) if prompted.startswith(asked) else []
        if len(prompt) > 1 and not prompt[0].text:
            header = [(piece.control, piece.text) for piece in prompt[1:]]
        elif prompted == asked and _PROBE_QUESTION not in before:
            # No generation prompt: the question's closing token opens the answer ("[/INST]").
            header = [(turn[inside].control, before)]
        else:
            raise _no_control_tokens()
        common = _common_prefix(header[-1][1], before)
        rest = header[-1][1][len(common) :]
        header[-1] = (header[-1][0], common)
        finder = cls(header=tuple(header), prompt_rest=rest, end_of_turn=turn[inside + 1].control)
        if len(finder.find(turn)) != 1:
            raise _no_control_tokens()
        return finder

    def find(self, pieces: Sequence[Piece]) -> list[TurnPieces]:
        """All assistant turns of a cut conversation, in order."""
        turns = []
        i, span = 0, len(self.header)
        while i + span <= len(pieces):
            if not self._opens(pieces[i : i + span]):
                i += 1
                continue
            first = i + span - 1
            header = self.header[-1][1]
            if self.prompt_rest and pieces[first].text.startswith(header + self.prompt_rest):
                header += self.prompt_rest
            last = first + 1
            while last < len(pieces) and pieces[last].control != self.end_of_turn:
                last += 1
            turns.append(TurnPieces(first, header, last))
            i = last
        return turns

    def _opens(self, window: Sequence[Piece]) -> bool:
        *exact, (control, prefix) = self.header
        return (
            all(piece.control == c and piece.text == t for piece, (c, t) in zip(window, exact, strict=False))
            and window[-1].control == control
            and window[-1].text.startswith(prefix)
        )


def _answer_piece(answered: str, vocabulary: ControlVocabulary) -> tuple[list[Piece], int | None]:
    pieces = Shield(vocabulary, ()).cut(answered)
    return pieces, next((i for i, piece in enumerate(pieces) if _PROBE_ANSWER in piece.text), None)


def _no_control_tokens() -> ConfigError:
    return ConfigError(
        "the chat template does not open and end the assistant's turns with control tokens, "
        "so packtool cannot tell which tokens are targets",
        "ChatML, Llama 3, Gemma, Phi, Mistral and DeepSeek templates do; put such a one into chat_template.jinja.",
    )


def _common_prefix(a: str, b: str) -> str:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]
