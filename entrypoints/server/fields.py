"""What all request bodies have in common, and how tolerant the server is: as OpenAI's, and no more than is harmless.

- Null is the same as leaving a field out, but where a field gives null a meaning of its own.
- Fields that OpenAI defines and that change nothing here are taken in silence (`NoEffect`).
- Fields that nobody knows are kept aside (`Body.unknown_fields`): ignored and told of, or refused (`--strict-fields`).
- Known fields that would change the answer and are not supported are refused by name, unless they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

Ids = Annotated[list[Annotated[int, Strict()]], Field(fail_fast=True)]
"""neither booleans nor texts"""
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
"""one wrong item is named, not each of a million"""
Effort = Literal["none", "off", "disabled", "minimal", "low", "medium", "high", "xhigh", "max"]
"""of thinking: OpenAI's words and Anthropic's, and two that mean none"""
NoEffect = Annotated[Any, Field(description="accepted, and has no effect here")]


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="allow")

    NULLS: ClassVar[frozenset[str]] = frozenset()
    """fields that give null a meaning"""
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """fields that are refused, and with which values they ask for nothing; false and what is empty does so always"""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.NULLS}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            neutral = self.UNSUPPORTED.get(name)
            if neutral is not None and value and value not in neutral:
                raise refusal(name, f"{name} is not supported")
        return self

    def unknown_fields(self) -> list[str]:
        """With those inside of other fields, as ``outer.inner``."""
        names = [name for name in self.model_extra or () if name not in self.UNSUPPORTED]
        for outer in type(self).model_fields:
            value = getattr(self, outer)
            if isinstance(value, Body):
                names += [f"{outer}.{inner}" for inner in value.unknown_fields()]
        return names


def refusal(param: str, message: str) -> PydanticCustomError:
    """A validation error of the whole body that names the field at fault."""
    return PydanticCustomError("refused", "{reason}", {"reason": message, "param": param})
