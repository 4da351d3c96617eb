"""How much there is to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from h2o_flexgen.config.checks import whole
from h2o_flexgen.config.flags import flag


@dataclass(frozen=True)
class Workload:
    """Sequences and their lengths in tokens; where these differ, the largest of the call. Raises UsageError."""

    prompt_len: int = field(metadata=flag("--prompt-len", "--input-len", help="tokens per prompt", metavar="N"))
    gen_len: int = field(metadata=flag("--gen-len", "--output-len", help="tokens to generate per prompt", metavar="N"))
    num_sequences: int = field(default=1, metadata=flag("--num-prompts", help="how many prompts", metavar="N"))

    def __post_init__(self) -> None:
        labels = {"prompt_len": "--prompt-len", "gen_len": "--gen-len", "num_sequences": "--num-prompts"}
        for name, label in labels.items():
            object.__setattr__(self, name, whole(getattr(self, name), label, 1))

    @property
    def total_len(self) -> int:
        """Tokens of one sequence, prompt and generated."""
        return self.prompt_len + self.gen_len
