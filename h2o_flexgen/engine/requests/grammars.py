"""Grammars of `response_format`, and the tokens that they allow next in each row; by xgrammar (extra `schemas`)."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.engine.requests.sequence import Fault, Sequence
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.engine.requests.vocabularies import decoder_types, spelling
from h2o_flexgen.errors import UsageError

_KEPT = 128
"""Compiled grammars that are cached; one of long bounded strings takes up to 20 MB."""
_SHARED = 256 << 20
"""Bytes of xgrammar's cache: bounded strings take seconds to compile for a large vocabulary."""
_MOST_SPACES = 20
"""White space between two parts of JSON at most: without a bound, small models write nothing else."""
_OBJECT = '{"type": "object"}'
_CONTROL = bytes({*range(0x20)} - {*b"\r\n"})
"""Bytes that JSON must escape, and that the library allows in bounded strings."""
_AFTER = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90), 0xF4: range(0x90, 0xC0)}
"""First bytes of characters, and the second ones that make no UTF-8 of them: halves of surrogate pairs, numbers beyond
Unicode, longer forms than needed. The library allows all of these."""
_PAIRS = (b"%c[%c-%c]" % (first, barred[0], barred[-1]) for first, barred in _AFTER.items())
_NO_TEXT = re.compile(b"|".join((b"[\xc0\xc1\xf5-\xff]", *_PAIRS)))
"""In one token all that is no UTF-8."""


class Grammar(NamedTuple):
    """A form, compiled for a vocabulary: `compiled` is a future of xgrammar's CompiledGrammar; `beside` makes masks, in
    order, on a thread; `cuts`: by tokens that end within a character, the mask of those that may follow; `silent`:
    tokens without text."""

    compiled: Future[Any]
    beside: ThreadPoolExecutor
    cuts: Mapping[int, Tensor]
    silent: frozenset[int]


class Grammars:
    """The grammars of one model, compiled once each on a thread. `close` stops the threads."""

    def __init__(self, codec: TextCodec | None, vocab_size: int) -> None:
        self._codec, self._size = codec, vocab_size
        self._made: OrderedDict[ResponseFormat, Grammar] = OrderedDict()
        self._pools: list[ThreadPoolExecutor] = []
        self._pieces: dict[bool, list[bytes]] = {}
        self._cuts: dict[int, Tensor] = {}
        self._silent: dict[bool, frozenset[int]] = {}
        self._compilers: dict[bool, Any] = {}

    def of(self, form: ResponseFormat, where: str) -> Grammar:
        """The grammar of `form`. UsageError naming `where` for a schema that cannot be followed, or a model without a
        suitable tokenizer."""
        if form in self._made:
            self._made.move_to_end(form)
            return self._made[form]
        library = _library()
        try:
            _follow(form, library.Grammar.from_structural_tag, library.Grammar.from_json_schema)
        except RuntimeError as error:
            raise UsageError(f"{where}: the schema cannot be followed: {_why(error)}") from None
        if self._codec is None or self._codec.light is None:
            raise UsageError(f"{where} has a response_format, and this model has no tokenizer that it works with")
        if not self._pools:
            self._pools = [ThreadPoolExecutor(1, name) for name in ("grammars", "masks")]
        spelt = form.tags is not None
        if spelt not in self._pieces:
            self._pieces[spelt] = token_bytes(self._codec.light, self._size, spelt)
            self._cuts = cuts(self._pieces[spelt])
            self._silent[spelt] = frozenset(token for token, piece in enumerate(self._pieces[spelt]) if not piece)
        compiled = self._pools[0].submit(lambda: self._compiled(form))
        grammar = self._made[form] = Grammar(compiled, self._pools[1], self._cuts, self._silent[spelt])
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return grammar

    def _compiled(self, form: ResponseFormat) -> Any:
        """xgrammar's CompiledGrammar. A Grammar would be printed and read again, where "\\xfc" and "be" become one."""
        compiler = self._compiler(form.tags is not None)
        return _follow(form, compiler.compile_structural_tag, compiler.compile_json_schema)

    def _compiler(self, spelt: bool) -> Any:
        if spelt not in self._compilers:
            library = _library()
            # Which tokens end a text is said row by row.
            vocabulary = library.TokenizerInfo(self._pieces[spelt], vocab_size=self._size, stop_token_ids=[])
            threads = torch.get_num_threads()
            self._compilers[spelt] = library.GrammarCompiler(vocabulary, max_threads=threads, cache_limit_bytes=_SHARED)
        return self._compilers[spelt]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        self._pools = []
        self._made.clear()


def _why(error: RuntimeError) -> str:
    """The library's message, without the place in its own source before it."""
    text = str(error).strip()
    last = text.rpartition("\n")[2].rsplit(".cc:", 1)[-1].partition(": ")[2]
    return last or text or "the library does not say why"  # as of bounds beyond 64 bits


def _follow(form: ResponseFormat, tags: Callable[..., Any], schema: Callable[..., Any]) -> Any:
    """A form by one of xgrammar's functions; RuntimeError if it cannot be followed."""
    if form.tags is not None:
        return tags(form.tags)
    given = _OBJECT if form.schema is None else form.schema
    return schema(given, strict_mode=form.strict, max_whitespace_cnt=_MOST_SPACES)


def _library() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise UsageError(
            "a response_format is given, and xgrammar cannot be imported",
            change="pip install 'h2o_flexgen[schemas]'",
        ) from None
    return xgrammar


def token_bytes(tokenizer: Any, size: int, spelt: bool = False) -> list[bytes]:
    """The bytes of each of `size` token ids of a `tokenizers.Tokenizer`; empty for special tokens and for those with
    control characters or bytes that are no text. With `spelt`, none is empty. UsageError for an unknown decoder."""
    spell = spelling(tokenizer)
    if spell is None:
        kind = "+".join(sorted(decoder_types(tokenizer)))
        raise UsageError(f"response_format does not work with a tokenizer of the kind {kind}")
    pieces = [b""] * size
    for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
        if token < size:
            pieces[token] = spell(text)
    for token, added in tokenizer.get_added_tokens_decoder().items():
        if token < size:
            pieces[token] = b"" if added.special and not spelt else added.content.encode()
    if spelt:
        return pieces
    return [b"" if _NO_TEXT.search(piece) or any(byte in _CONTROL for byte in piece) else piece for piece in pieces]


def cuts(pieces: SequenceOf[bytes]) -> dict[int, Tensor]:
    """By those of the tokens `pieces` that end with the first byte of a character, where not all second ones make text
    of it: the mask of tokens that may follow, a bit each (1, vocab / 32) int32."""
    found = dict[int, Tensor]()
    for first, barred in _AFTER.items():
        allowed = np.ones(-(-len(pieces) // 32) * 32, dtype=np.bool_)
        allowed[[token for token, piece in enumerate(pieces) if piece and piece[0] in barred]] = False
        mask = torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32)).unsqueeze(0)
        found |= {token: mask for token, piece in enumerate(pieces) if piece and piece[-1] == first}
    return found


class Guide:
    """One row's state in its grammar.

    A greedy row asks whether its likeliest token is allowed (`tries`); a mask is made only if it is not. Masks for
    other rows are made on a thread, beside the next step. An eos is allowed where the text is complete; a row without
    eos ends as soon as its text is complete.
    """

    def __init__(self, row: Sequence, vocab_size: int) -> None:
        library, eos = _library(), sorted(row.eos)
        self.ends_by_itself, self._error = not eos, ""
        self.fault: Fault | None = None
        try:
            self._matcher = library.GrammarMatcher(
                row.grammar.compiled.result(), override_stop_tokens=eos or None, terminate_without_stop_token=not eos
            )
        except RuntimeError as error:  # one row's, not its neighbours'
            self.fault = "response_format"
            self._error = f"its response_format cannot be followed: {_why(error)}"
        self._mask, self._cuts = library.allocate_token_bitmask(1, vocab_size), row.grammar.cuts
        self._silent = row.grammar.silent.difference(eos)
        self._cut: Tensor | None = None
        self._filled = False
        self._tried: int | None = None
        self._following: Future[None] | None = None

    def _wait(self) -> None:
        if self._following is not None:
            self._following.result()
            self._following = None

    @property
    def mask(self) -> Tensor:
        """Allowed tokens, a bit each: (1, vocab / 32) int32."""
        self._wait()
        self._fill()
        return self._mask

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; empty where it can."""
        self._wait()
        return self._error

    def tries(self, token: int) -> bool:
        """Whether `token` may come next; if so it is taken, and the row must get it."""
        self._wait()
        if not self._accepts(token):
            return bool(self._error)
        self._tried = token
        return True

    def take(self, token: int) -> None:
        if self._tried is not None:
            self._tried = None
        elif not self._accepts(token) and not self._error:
            self._error = f"its grammar does not go on with token {token}"

    def _accepts(self, token: int) -> bool:
        # The library writes a warning when it is asked about a token without text.
        if self._error or token in self._silent:
            return False
        if self._cut is not None and not self._cut[0, token // 32] >> token % 32 & 1:
            return False
        try:
            accepted = bool(self._matcher.accept_token(token))
        except RuntimeError as error:  # one row's, not its neighbours'
            accepted, self._error = False, f"its grammar failed at token {token}: {error}"
        if accepted:
            self._filled, self._cut = False, self._cuts.get(token)
        return accepted

    def _fill(self) -> None:
        if self._filled or self._error or self._matcher.is_terminated():
            return
        try:
            self._matcher.fill_next_token_bitmask(self._mask)
            if self._cut is not None:
                self._mask &= self._cut
            self._filled = True
        except RuntimeError as error:
            self._error = f"its grammar failed: {error}"

    def ends_with(self, token: int) -> bool:
        """Takes the new token of a row that `ends_by_itself`, and returns whether its text is complete."""
        if not self.ends_by_itself:
            return False
        self.take(token)
        return bool(self._matcher.is_terminated())

    @staticmethod
    def follow(rows: SequenceOf[Sequence]) -> None:
        """Takes the last tokens of `rows`, unless done, and makes their next masks on the thread."""
        masks = list[tuple[Guide, int | None]]()
        for row in rows:
            token = None if row.guide.ends_by_itself else row.token_ids[-1]
            if row.chooser is not None:
                masks.append((row.guide, token))
            elif token is not None:
                row.guide.take(token)
        if not masks:
            return

        def make() -> None:
            for guide, token in masks:
                if token is not None:
                    guide.take(token)
                guide._fill()

        following = rows[0].grammar.beside.submit(make)
        for guide, _ in masks:
            guide._following = following
