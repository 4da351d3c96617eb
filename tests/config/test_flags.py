"""Flags generated from fields: defaults in the help, booleans in three spellings, round trips, typos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given as using
from hypothesis import strategies as st

from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import _flagged, add_arguments, from_namespace, given, option, parse_bool
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.errors import UsageError
from tests.config.test_offload import shares


def parser(*classes: type[Any], **options: Any) -> Parser:
    made = Parser(prog="prog")
    for cls in classes:
        add_arguments(made, cls, **options)
    return made


def to_argv(config: Any) -> list[str]:
    """The arguments that give `config` back, its values as `--help` shows them."""
    arguments = []
    for item in _flagged(type(config)):
        value = getattr(config, item.name)
        if isinstance(value, bool):
            arguments.append(item.names[0] if value else f"--no-{item.names[0][2:]}")
        elif value is not None:
            arguments.append(f"{item.names[0]}={item.show(value)}")
    return arguments


def parse(cls: type[Any], *arguments: str) -> Any:
    return from_namespace(cls, parser(cls).parse_args(arguments))


@using(
    weights=shares(),
    cache=shares(),
    batch=st.integers(1, 99),
    overlap=st.booleans(),
    cpu_cache_compute=st.booleans(),
)
def test_policy_to_arguments_and_back(
    weights: Any, cache: Any, batch: int, overlap: bool, cpu_cache_compute: bool
) -> None:
    policy = OffloadPolicy(batch, 2, weights, cache, overlap=overlap, cpu_cache_compute=cpu_cache_compute)
    assert parse(OffloadPolicy, *to_argv(policy)) == policy


@pytest.mark.parametrize(
    "config",
    [
        EvictionConfig(),
        EvictionConfig("h2o", 0.07, recent=3),
        EvictionConfig("streaming", budget=20, sinks=0),
        EvictionConfig("random", 1e-5, recent_ratio=0.1 + 0.2),
        Workload(512, 32),
        Workload(1, 1, 7),
    ],
)
def test_configs_to_arguments_and_back(config: Any) -> None:
    assert parse(type(config), *to_argv(config)) == config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], True),
        (["--overlap"], True),
        (["--no-overlap"], False),
        (["--overlap", "true"], True),
        (["--overlap", "0"], False),
        (["--overlap=False"], False),
        (["--overlap", "1"], True),
        (["--overlap", "--gbs", "2"], True),
        (["--overlap", "false", "--overlap"], True),
    ],
)
def test_booleans(arguments: list[str], expected: bool) -> None:
    assert parse(OffloadPolicy, *arguments).overlap is expected


def test_aliases_and_values() -> None:
    policy = parse(OffloadPolicy, "--gbs", "4", "--num-gb=3", "--weights-placement", "cpu=0.3,disk=0.7")
    assert policy == OffloadPolicy(4, 3, {"cpu": 0.3, "disk": 0.7})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overlap", "maybe"], "'maybe' is neither true nor false"),
        (["--no-overlap=1"], "--no-overlap takes no value"),
        (["--gbs", "four"], "invalid int value: 'four'"),
        (["--weights-placement", "cpu=0.3"], "adds up to 0.3"),
        (["--cache-placement", "dsk"], "did you mean 'disk'?"),
        (["--gpu-batch-sze", "4"], "unrecognized arguments: --gpu-batch-sze 4\n  did you mean '--gpu-batch-size'?"),
        (["--gpu-batch", "4"], "did you mean '--gpu-batch-size'?"),
    ],
)
def test_mistakes_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser(OffloadPolicy).parse_args(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_values_out_of_range_are_refused_by_the_class() -> None:
    with pytest.raises(UsageError, match="--hh-ratio is nan"):
        parse(EvictionConfig, "--eviction", "h2o", "--hh-ratio", "nan")


def test_help_shows_the_defaults() -> None:
    text = " ".join(parser(OffloadPolicy, EvictionConfig).format_help().split())
    for shown in ("(default: 1)", "(default: true)", "(default: cpu=1.0)", "(default: half the budget)"):
        assert shown in text
    assert "(required)" in parser(Workload).format_help()


def test_defaults_of_a_program() -> None:
    defaults = {"prompt_len": 512, "gen_len": 32}
    made = parser(Workload, defaults=defaults)
    assert "(default: 512)" in made.format_help()
    namespace = made.parse_args(["--gen-len", "8"])
    assert from_namespace(Workload, namespace, defaults=defaults) == Workload(512, 8)
    assert given(Workload, namespace) == {"gen_len": 8}


def test_fields_can_be_left_out() -> None:
    with pytest.raises(SystemExit):
        parser(OffloadPolicy, exclude=("lookahead",)).parse_args(["--lookahead", "2"])


def test_a_percent_sign_in_the_help() -> None:
    @dataclass(frozen=True)
    class Percent:
        value: int = option(5, help="in %")

    assert "in % (default: 5)" in parser(Percent).format_help()


def test_boolean_words() -> None:
    assert [parse_bool(word) for word in ("TRUE", "on", "0", "No")] == [True, True, False, False]
    with pytest.raises(UsageError, match="'2' is neither"):
        parse_bool("2")
