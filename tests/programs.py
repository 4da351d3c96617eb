"""What tests of the programs share: a tiny model that speaks characters, and ways to run a program and look at it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from h2o_flexgen.models.families import checkpoint_names, spec_from_config
from h2o_flexgen.run import main
from tests.seeds import torch_generator

CHARACTERS = "".join(map(chr, range(32, 127)))
CONFIG: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 4 + len(CHARACTERS),
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A model with random weights and one token per printable character, as the hub would have it."""
    folder.mkdir(exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_talker(folder: Path, **changes: Any) -> Path:
    """The same with a chat template."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (write_model(folder, **changes) / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tensors(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Weights by their checkpoint names, large enough that no two tokens are about as likely."""
    spec, generator = spec_from_config(config, "tiny"), torch_generator(5)
    shapes = {tensor.name: tensor.shape for group in spec.weight_groups for tensor in group.tensors}
    weights = {}
    for name, options in checkpoint_names(spec).items():
        noise = torch.randn(shapes[name], generator=generator)
        weights[options[0]] = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.4 * noise
    return weights


def tokenizer() -> Tokenizer:
    special = ["<none>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*special, *CHARACTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.add_special_tokens(special)
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    made.decoder = decoders.Fuse()
    return made


def token(character: str) -> int:
    """The id of a character."""
    return 4 + CHARACTERS.index(character)


@dataclass(frozen=True)
class Ran:
    """How a program ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        loaded = json.loads(self.out.splitlines()[-1])
        assert isinstance(loaded, dict), loaded
        return loaded


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder. Not to be changed."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A tiny model of the test's own, to be damaged."""
    return write_model(tmp_path / "model")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process: `run("--model", folder, "--prompt", "abc")`."""

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call


def answers(path: Path) -> list[dict[str, Any]]:
    """The lines of an answer file, each of which must be whole."""
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n"), text
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Child:
    """The program in a forked process, so that signals and limits are real and torch is not imported again.

    `before` runs in the child first, then `program`, `run` unless another is given. A context manager: what still runs
    at the end is killed.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        before: Callable[[], object] = lambda: None,
        program: Callable[[list[str]], int] | None = None,
    ) -> None:
        self._program = program or main
        self._files = [folder / "stdout", folder / "stderr"]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_program([str(argument) for argument in arguments], before)

    def _be_the_program(self, arguments: list[str], before: Callable[[], object]) -> NoReturn:
        code = 99
        try:
            torch.set_num_threads(1)  # OpenMP's threads are the parent's: a child that asks for several waits for ever
            for number, path in enumerate(self._files, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                signal.signal(number, handler)
            before()
            code = self._program(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()  # as the interpreter does at its end
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, seconds: float = 20.0) -> Ran:
        """How it ended; 128 + n for one that signal n killed. AssertionError where it does not end in time."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                code = os.waitstatus_to_exitcode(status)
                return Ran(code if code >= 0 else 128 - code, *(path.read_text() for path in self._files))
            assert time.monotonic() < end, f"still running after {seconds} s: {self._files[1].read_text()}"
            time.sleep(0.005)

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def on_a_terminal(folder: Path, columns: int, *arguments: object, stream: int = 2) -> tuple[int, str]:
    """The exit code, and all that a terminal of `columns` got on stderr, or on another `stream`."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with Child(folder, *arguments, before=lambda: os.dup2(follower, stream)) as child:
        os.close(follower)
        seen = b""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if select.select([leader], [], [], 0.1)[0]:
                try:
                    seen += os.read(leader, 65536)
                except OSError:  # the other end is closed
                    break
        code = child.wait().code
    os.close(leader)
    return code, seen.decode()


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for `true`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def left_in(folder: Path) -> list[str]:
    """What a run left in its offload folder, beside the lock and packed weights."""
    return sorted(path.name for path in folder.iterdir() if path.name != "lock" and not path.name.startswith("packed-"))
