"""Conversations to prompts, by the chat template that comes with a model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from h2o_flexgen.config.checks import iterable, whole_text
from h2o_flexgen.config.prompt import Prompt, Span, token_spans
from h2o_flexgen.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from h2o_flexgen.engine.requests.tokenizer import TextCodec

Message = dict[str, Any]
Conversation = str | SequenceOf[Mapping[str, Any]]
"""Messages {"role": ..., "content": ...} in order, or what a user says first."""

_MESSAGE = '{"role": "user", "content": "..."}'


_SETTINGS = (
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "messages",
)
"""Arguments of rendering itself, which no template may be given."""

_CHARACTERS, _SURELY = 8, 1.25  # for each token of the context; the word at the cut may take a few tokens more


def chat_prompts(
    codec: TextCodec | None,
    model: str,
    conversations: SequenceOf[Conversation],
    arguments: Mapping[str, Any] | None = None,
    *,
    skip: bool = False,
) -> list[Prompt | UsageError]:
    """The token ids of each conversation, ready for the model's answer. UsageError as from `chat_text`; with `skip` it
    takes the place of that conversation."""
    talks = [conversations] if isinstance(conversations, str | Mapping) else conversations
    talks = list(iterable(talks, "conversations", "needed a list of them"))
    if isinstance(conversations, str | Mapping) or (talks and isinstance(talks[0], Mapping)):
        raise UsageError("conversations is one conversation", "needed a list of them", "wrap it: [conversation]")
    prompts = list[Prompt | UsageError]()
    for index, talk in enumerate(talks):
        try:
            prompts.append(marked_chat(codec, model, talk, (), f"conversation {index}", arguments))
        except UsageError as error:
            if not skip:
                raise
            prompts.append(error)
    return prompts


def chat_text(
    codec: TextCodec | None,
    model: str,
    conversation: Conversation,
    where: str,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """A conversation rendered by the model's template, in transformers' sandbox, up to the beginning of the answer.

    arguments: of the template itself, such as enable_thinking. UsageError naming `where` if it is not a conversation or
    does not suit the template, or if the model has none.
    """
    messages, arguments = checked_messages(conversation, where), checked_arguments(arguments, where)
    if codec is None:
        raise UsageError(f"{model} has no tokenizer", "needed a tokenizer with a chat template beside its config.json")
    tokenizer = codec.transformed
    template = None if tokenizer is None else tokenizer.chat_template
    if isinstance(template, dict) and "default" not in template:
        names = ", ".join(sorted(template)) or "an empty list"
        raise UsageError(f"{model} has no chat template of the name default, only {names}")
    if not template:
        raise UsageError(
            f"{model} has no chat template",
            "needed tokenizer.chat_template in a GGUF file's metadata; in a folder, chat_template in "
            "tokenizer_config.json or a file chat_template.jinja",
            "take a model that was trained on conversations, or complete plain text: generate(), run without --chat, "
            "/v1/completions",
        )
    return _rendered(tokenizer, messages, arguments, f"{where} does not suit the chat template of {model}")


def marked_chat(
    codec: TextCodec | None,
    model: str,
    conversation: Conversation,
    spans: Any,
    where: str,
    arguments: Mapping[str, Any] | None = None,
) -> Prompt:
    """The token ids of a conversation, with `spans` of the rendered text, and the tokens that end the model's turn. The
    template writes BOS, so none is added."""
    text = chat_text(codec, model, conversation, where, arguments)
    ids, prompt = prompt_ids(codec, text, where, bare=True) if codec is not None else [], Prompt(text, spans)
    found = token_spans(prompt, len(ids), offsets_of(prompt, codec, special=False))
    marks = [Span(span.start, span.stop, span.name, span.keep) for span in found]
    return Prompt(ids, marks, codec.turn_ends if codec is not None else ())


def prompt_ids(codec: TextCodec, text: str, where: str, *, bare: bool = False) -> list[int]:
    """The tokens of a prompt; `bare`: without special ones. UsageError if it is no text, ContextLengthError if its
    beginning alone is longer than the context: tokenizers take hundreds of bytes for a character."""
    encode, cut = codec.encode_bare if bare else codec.encode, _CHARACTERS * codec.context
    if len(whole_text(text, where)) > cut and (count := len(encode(text[:cut]))) > _SURELY * codec.context:
        raise ContextLengthError(
            f"{where} has at least {count} tokens, those of its first {cut} characters",
            f"the context of the model is {codec.context} tokens",
            "shorten the prompt; nothing is ever cut off silently",
        )
    return encode(text)


def offsets_of(prompt: Prompt, codec: TextCodec | None, special: bool) -> list[tuple[int, int]] | None:
    """The characters of each token, if any span is counted in them; UsageError if the tokenizer does not tell."""
    if not isinstance(prompt.content, str) or all(span.unit == "token" for span in prompt.spans):
        return None
    if codec is None or codec.offsets is None:
        raise UsageError("spans are in characters, and this tokenizer does not tell of which", 'needed "unit": "token"')
    return codec.offsets(prompt.content, special)


def checked_messages(conversation: Any, where: str) -> list[Message]:
    """The messages of a conversation; a string is one message of the user, and a content in text parts is joined.
    UsageError if it is not a conversation."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    if not isinstance(conversation, SequenceOf) or not conversation:
        raise UsageError(f"{where} has no messages", f"needed a string or [{_MESSAGE}, ...]")
    messages = list[Message]()
    for number, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} of {where} is {message!r}", f"needed {_MESSAGE}")
        message = {**message, "content": _joined(message.get("content"))}
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UsageError(f"message {number} of {where} has no {key} that is text", f"needed {_MESSAGE}")
        messages.append(message)
    return messages


def checked_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """`chat_template_kwargs`; null counts as none. UsageError if it is no object, or has arguments of rendering."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise UsageError(
            f"chat_template_kwargs of {where} is {str(arguments)[:80]!r}",
            'needed {"enable_thinking": false} or the like',
        )
    for name in arguments:
        if name in _SETTINGS:
            raise UsageError(f"chat_template_kwargs of {where} has {name}", "needed arguments of the template itself")
    return dict(arguments)


def _joined(content: Any) -> Any:
    """The text of a content whose parts are all texts; other contents unchanged."""
    if not isinstance(content, SequenceOf) or isinstance(content, str) or not content:
        return content
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


def with_system(messages: list[Message], system: str) -> list[Message]:
    """`messages` after the system message `system`, unless they start with one of their own."""
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _rendered(tokenizer: Any, messages: list[Message], arguments: dict[str, Any], complaint: str) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments))
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{complaint}: {error}") from error
