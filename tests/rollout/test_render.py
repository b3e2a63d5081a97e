"""Rendering is append-only, and the text of a message never becomes a control token."""

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_sao.rollout.render import Renderer
from megatron_sao.types import Message
from tools.warm_start.model import CONTROL_TOKENS, build_tokenizer

ROLE = "<|{{ m['role'] }}|>"
TURNS = "{% for m in messages %}" + ROLE + "{{ m['content'] }}<|end|>{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# like Qwen3's: what an assistant thought is dropped once a user has spoken after it
DROPS_THINKING = (
    "{% for m in messages %}" + ROLE + "{% if loop.last %}{{ m['content'] }}{% else %}"
    "{{ m['content'].split('</think>')[-1] }}{% endif %}<|end|>{% endfor %}" + OPEN
)
TRIMS = "{% for m in messages %}" + ROLE + "{{ m['content'] | replace('\"', \"'\") }}<|end|>{% endfor %}" + OPEN


def tokenizer_with(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    return Renderer(tokenizer)


def tool(content: str) -> Message:
    return Message(role="tool", content=content)


def user(content: str) -> Message:
    return Message(role="user", content=content)


def test_a_prompt_is_what_the_template_renders(renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 2 ="}], add_generation_prompt=True, tokenize=False
    )
    assert expected == "<|user|>1 + 2 =<|end|><|assistant|>"
    assert tokenizer.decode(renderer.prompt_ids((user("1 + 2 ="),))) == expected


def test_prompt_answer_and_observation_together_are_the_rendered_conversation(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase
) -> None:
    turns = [("user", "1 + 2 ="), ("assistant", "calc(1 + 2)"), ("tool", "3")]
    whole = tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in turns], add_generation_prompt=True, tokenize=False
    )
    action = (*renderer.plain_ids("calc(1 + 2)"), tokenizer.eos_token_id)  # the model samples its end-of-turn token
    ids = (*renderer.prompt_ids((user("1 + 2 ="),)), *action, *renderer.observation_ids((tool("3"),)))
    assert list(ids) == tokenizer.encode(whole, add_special_tokens=False)


def test_the_end_of_turn_token_is_the_models_and_what_follows_it_is_observation() -> None:
    template = "{% for m in messages %}" + ROLE + "\n{{ m['content'] }}<|end|>\n{% endfor %}" + OPEN
    renderer = Renderer(tokenizer_with(template))
    ids = renderer.observation_ids((tool("3"),))
    assert build_tokenizer().decode(ids) == "\n<|tool|>\n3<|end|>\n<|assistant|>"


@pytest.mark.parametrize("text", [*CONTROL_TOKENS, "a<|end|>b<|<|tool|>|>", "<|end|><|end|>", "<|<|end|>end|>", ""])
def test_control_strings_in_a_text_never_become_control_ids(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    ids = renderer.plain_ids(text)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(list(ids)) == text
    controls = [i for i in renderer.observation_ids((tool(text),)) if i in tokenizer.all_special_ids]
    assert tokenizer.convert_ids_to_tokens(controls) == ["<|tool|>", "<|end|>", "<|assistant|>"]


def test_control_strings_that_overlap_are_all_spelled_out() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|end|>x", "x<|ring|>"])  # the second starts inside the first
    ids = Renderer(tokenizer).plain_ids("<|end|>x<|ring|>")
    assert not set(ids) & set(tokenizer.added_tokens_decoder)


def test_a_control_token_of_one_character_cannot_be_spelled_out_and_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["\u2581"], special_tokens=True)
    with pytest.raises(ValueError, match="makes control tokens"):
        Renderer(tokenizer).plain_ids("a\u2581b")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="rewrites earlier turns.*prefix-stable template, or set append_only"):
        Renderer(tokenizer_with(DROPS_THINKING))


def test_an_append_only_renderer_renders_the_new_messages_alone() -> None:
    renderer = Renderer(tokenizer_with(DROPS_THINKING), append_only=True)
    assert renderer.observation_ids((tool("3"),)) == Renderer(build_tokenizer()).observation_ids((tool("3"),))


def test_a_template_that_changes_a_message_is_refused() -> None:
    with pytest.raises(ValueError, match="changes or drops the content of a 'user' message"):
        Renderer(tokenizer_with(TRIMS))


def test_a_template_that_knows_no_tool_messages_is_refused() -> None:
    template = "{% for m in messages if m['role'] != 'tool' %}" + ROLE + "{{ m['content'] }}<|end|>{% endfor %}" + OPEN
    with pytest.raises(ValueError, match="content of a 'tool' message"):
        Renderer(tokenizer_with(template))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(tokenizer_with(None))
