"""From chat messages to token ids, append-only: new messages are rendered after a fixed prefix, old ids never change.

The template's own strings become control ids; the content of a message is encoded as plain text, so that a control
token's string inside it never becomes that token. Nothing here turns sampled tokens into text and back.
"""

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from megatron_sao.types import Message

_MARK = "\u2063{index}\u2063"  # stands for a message's content; U+2063 is an invisible separator
_MARKS = re.compile("\u2063(\\d+)\u2063")
_PROBES = ("Four.", "<think>\nTwo and two.\n</think>\n\nFour.", 'a "quoted"\nline & <b>')


class Renderer:
    """Renders with a tokenizer's chat template.

    `append_only=True` accepts a template that rewrites earlier turns (as Qwen3's drops their thinking): the episode
    then keeps what the model wrote, which is not what that template would show a served chat.

    Raises:
        ValueError: the tokenizer has no template or no end-of-turn token; the template changes a message's content;
            or, without `append_only`, rendering more messages changes what was rendered before.

    >>> renderer.observation_ids([Message(role="tool", content="46")])  # "<|tool|>46<|end|><|assistant|>"
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, new_role: str = "tool", append_only: bool = False
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: give it one")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-turn (eos) token")
        self._tokenizer = tokenizer
        self._control_ids = frozenset(int(i) for i in tokenizer.added_tokens_decoder)
        strings = sorted({token.content for token in tokenizer.added_tokens_decoder.values()} - {""})
        self._control = re.compile(f"(?={'|'.join(map(re.escape, strings))})" if strings else r"(?!)")  # may overlap
        self._refuse_changed_content(new_role)
        if not append_only:
            self._refuse_rewritten_turns(new_role)
        self._end_ids = self._text_ids(self._after_answer(()), ())
        self._prompt_texts: dict[tuple[str, ...], str] = {}  # by the messages' roles: contents are only marks there
        self._observation_texts: dict[tuple[str, ...], str] = {}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the tokenizer's eos and what the template closes an assistant's message with."""
        closing = self._end_ids[:1] if self._opens_with_control(self._end_ids) else ()
        return tuple(dict.fromkeys((int(self._tokenizer.eos_token_id), *closing)))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole conversation and the opening of the assistant's turn."""
        roles = tuple(m.role for m in messages)
        if roles not in self._prompt_texts:
            marked = [(role, _MARK.format(index=i)) for i, role in enumerate(roles)]
            self._prompt_texts[roles] = self._render(marked, open_turn=True)
        return self._text_ids(self._prompt_texts[roles], [m.content for m in messages])

    def observation_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """What stands between a matched stop token and the assistant's next turn, with `messages` in it.

        The template's closing of the assistant's turn is left out up to its end-of-turn token, which the model has
        sampled itself.
        """
        roles = tuple(m.role for m in messages)
        if roles not in self._observation_texts:
            self._observation_texts[roles] = self._after_answer(roles)
        ids = self._text_ids(self._observation_texts[roles], [m.content for m in messages])
        return ids[1:] if self._opens_with_control(ids) else ids

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """The ids of plain text: a control token's string is spelled out and never becomes its id.

        Raises:
            ValueError: the tokenizer gives a control id all the same (a control string of one character).
        """
        pieces, start = [], 0
        for match in self._control.finditer(text):
            cut = match.start() + 1  # a string that is cut in two matches nothing
            pieces.append(text[start:cut])
            start = cut
        ids = tuple(i for piece in (*pieces, text[start:]) for i in self._encode(piece))
        if bad := self._control_ids.intersection(ids):
            raise ValueError(f"the tokenizer makes control tokens {sorted(bad)} of the plain text {text[:200]!r}")
        return ids

    def text_of(self, ids: Iterable[int]) -> str:
        """Sampled ids as text, control tokens left out; for parsing and rewards, never encoded again."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _text_ids(self, text: str, contents: Sequence[str]) -> tuple[int, ...]:
        """Template text is encoded with its control tokens, each mark is replaced by its content as plain text."""
        ids: list[int] = []
        for index, part in enumerate(_MARKS.split(text)):
            ids.extend(self.plain_ids(contents[int(part)]) if index % 2 else self._encode(part))
        return tuple(ids)

    def _render(self, turns: Sequence[tuple[str, str]], *, open_turn: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))

    def _after_answer(self, roles: Sequence[str]) -> str:
        """The template's text after an assistant's content, with marks for the contents of messages of `roles`."""
        answer = _MARK.format(index=len(roles))
        new = [(role, _MARK.format(index=i)) for i, role in enumerate(roles)]
        text = self._render([("user", "2 + 2"), ("assistant", answer), *new], open_turn=bool(roles))
        return text.partition(answer)[2]

    def _opens_with_control(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[0] in set(self._tokenizer.all_special_ids)

    def _refuse_changed_content(self, new_role: str) -> None:
        for role, before in (("user", ()), (new_role, (("user", "x"), ("assistant", "y")))):
            marked = self._render([*before, (role, _MARK.format(index=0))], open_turn=True)
            shown = self._render([*before, (role, _PROBES[-1])], open_turn=True)
            if _MARK.format(index=0) not in marked or marked.replace(_MARK.format(index=0), _PROBES[-1]) != shown:
                raise ValueError(
                    f"the chat template changes or drops the content of a {role!r} message ({shown!r}): "
                    "use a template that writes it as it is"
                )

    def _refuse_rewritten_turns(self, new_role: str) -> None:
        for answer in _PROBES:
            old = [("user", "2 + 2"), ("assistant", answer)]
            before = self._render(old, open_turn=False)
            after = self._render([*old, (new_role, "seen")], open_turn=False)
            if not after.startswith(before):
                raise ValueError(
                    f"the chat template rewrites earlier turns: {before!r} is no prefix of {after!r}. Tokens that were "
                    "sampled cannot change: use a prefix-stable template, or set append_only = true to render only "
                    "the new messages"
                )
