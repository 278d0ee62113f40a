"""Every bound can be set where it is named."""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import ConfigError
from engine.limits import Limits, limits_of, parse_limits


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_each_limit_can_be_set_by_its_flag_and_in_python(name: str) -> None:
    default = getattr(Limits(), name)
    value = 2 * default
    limits = parse_limits([f"{name}={value}"])
    assert getattr(limits, name) == value and type(getattr(limits, name)) is type(default)
    assert limits == limits_of({name: value}) == msgspec.structs.replace(Limits(), **{name: value})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("prompts=2.5", "whole number"),
        ("prompts=nan", "whole number"),
        ("prompts=inf", "whole number"),
        ("prompts=x", "prompts=x"),
        ("prompts=-1", ">= 1"),
        ("prompts", "NAME=VALUE"),
        ("template_s=nan", "template_s"),
        ("template_s=0", "template_s"),
        ("body_bytes=1XiB", "body_bytes"),
        ("fruits=3", "prompts"),
    ],
)
def test_what_is_no_limit_is_refused_by_name(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_limits([setting])


def test_sizes_may_have_units() -> None:
    assert parse_limits(["body_bytes=1MiB", "template_s=0.5"]).body_bytes == 1 << 20
