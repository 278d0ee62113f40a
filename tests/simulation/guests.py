"""Who asks the simulated engine for something: what each wants, how it behaves, and what it must be given."""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from simulated_core import FAULTY, KILLER
from toy_adapters import BROKEN, adapter
from toy_model import POISON, generate, search

from engine.core.wire import AddRequest
from engine.errors import (
    CoreDiedError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from engine.frontend.admission import AdmittedRequest, parse_prompt
from engine.request import RequestOutput, SamplingParams, Tenant
from engine.serving import Serving

EOS = 1
Leaves = Literal["stays", "closes", "aborts"]


class Wish(msgspec.Struct, frozen=True):
    """One request. `killed_at`: what computes so many of its tokens dies."""

    name: str
    arrives: float
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: Tenant = Tenant("")
    salt: str | None = None
    grammar: str | None = None
    adapter: int = 0
    delta: bool = False
    final_only: bool = False
    timeout_s: float | None = None
    pause_s: float = 0.0
    """between two outputs that it takes"""
    leaves: Leaves = "stays"
    leaves_after: float = 0.0
    is_invalid: bool = False


def draw_wishes(rng: Random, scheduling: str, may_kill: bool, crowd: int) -> list[Wish]:
    heads = [[rng.randrange(11) for _ in range(rng.randint(4, 30))] for _ in range(3)]
    spread = rng.choice([0.0, 0.2, 2.0, 20.0])
    wishes = [_draw(rng, index, heads, scheduling, spread) for index in range(crowd)]
    if scheduling == "fair" and rng.random() < 0.3:
        wishes += [_draw_flood(rng, index) for index in range(60)]
    if may_kill:
        victim = rng.randrange(crowd)
        prompt = wishes[victim].prompt
        prompt = [*prompt[:3], KILLER, *prompt[4:]]
        wishes[victim] = replace(wishes[victim], prompt=prompt, leaves="stays", timeout_s=None, is_invalid=False)
    return wishes


def _draw(rng: Random, index: int, heads: list[list[int]], scheduling: str, spread: float) -> Wish:
    prompt = rng.choice(heads)[: rng.randint(1, 30)] + [rng.randrange(11) for _ in range(rng.randint(0, 10))]
    if rng.random() < 0.08:
        prompt[rng.randrange(len(prompt))] = rng.choice([POISON, FAULTY])
    most = rng.randint(1, 24)
    width = rng.choice([0] * 8 + [1, 2])
    n = rng.choice([1, 1, 1, 2, 3]) if not width else rng.randint(1, width)
    params = SamplingParams(
        n=n,
        best_of=width or None,
        use_beam_search=bool(width),
        temperature=0.0 if width else 1.0,
        seed=None if width else rng.randrange(1000),
        max_tokens=most,
        min_tokens=0 if width else rng.choice([0, 0, rng.randint(0, most)]),
        stop_token_ids=sorted({rng.randrange(11) for _ in range(rng.choice([0, 0, 1, 2]))}),
        ignore_eos=rng.random() < 0.5,
        prompt_logprobs=1 if not width and rng.random() < 0.15 else None,
    )
    kind = rng.random()
    return Wish(
        name=f"guest-{index}",
        arrives=rng.uniform(0.0, spread),
        prompt=prompt,
        params=params,
        priority=rng.randint(-1, 1) if scheduling == "priority" else 0,
        tenant=rng.choice([Tenant("a", 1.0), Tenant("b", 1.0), Tenant("c", 2.0)])
        if scheduling == "fair"
        else Tenant(""),
        salt=rng.choice([None, None, None, "salt"]),
        grammar=_grammar(rng, bool(width)) if rng.random() < 0.25 else None,
        adapter=rng.choice([0, 0, 0, 0, 0, 1, 2, 3, BROKEN]),
        delta=kind < 0.4,
        final_only=0.4 <= kind < 0.5,
        timeout_s=rng.choice([None, None, None, None, rng.uniform(0.01, 5.0)]),
        pause_s=rng.choice([0.0, 0.0, 0.0, rng.uniform(0.0, 0.5)]),
        leaves=rng.choice(["stays"] * 8 + ["closes", "aborts"]),  # type: ignore[arg-type]
        leaves_after=rng.uniform(0.0, 0.5),
        is_invalid=rng.random() < 0.03,
    )


def _draw_flood(rng: Random, index: int) -> Wish:
    """One tenant's prompts are long and its answers short, another one's are not: shares have to be told apart."""
    tenant, prompt, answer = (("a", 2, 24), ("b", 30, 2))[index % 2]
    params = SamplingParams(temperature=1.0, seed=index, max_tokens=answer, min_tokens=answer, ignore_eos=True)
    return Wish(f"flood-{index}", 0.0, [rng.randrange(11) for _ in range(prompt)], params, tenant=Tenant(tenant))


def _grammar(rng: Random, searches: bool) -> str:
    return f"{rng.choice('abc')}:{0 if searches else rng.choice([0, 1, 4, 9])}:{rng.choice([0, 0, 1, 5])}"


class Guest:
    """One request's life, from outside."""

    def __init__(self, world: Any, wish: Wish, request_id: str) -> None:
        """`request_id`: another front end's guest may have the same."""
        self._world, self.wish, self.request_id = world, wish, request_id
        self.end = "not yet"
        self.parts: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self.message: AddRequest | None = None
        self.asked_at, self.ended_at = math.inf, math.inf
        self.aborted = False
        self._stop: set[int] = set()
        self.serving: Serving
        """that it asked last"""

    @property
    def num_sequences(self) -> int:
        assert self.message is not None
        beams = self.message.beams
        return max(len(self.message.request_ids), 0 if beams is None else beams.width)

    async def live(self) -> None:
        wish, world = self.wish, self._world
        await asyncio.sleep(wish.arrives)
        try:
            await self._ask()
        except InvalidRequestError as error:
            too_wide = self.message is not None and self.message.beams is not None and "KV blocks" in str(error)
            assert wish.is_invalid or wish.adapter == BROKEN or too_wide, f"a good request was refused: {error}"
            self.end = "invalid"
        except QueueFullError as error:
            assert not any(self.parts.values()), f"who had been given something was refused: {error}"
            world.check_refusal(self, error)
            self.end = "refused"
        except DeadlineError:
            assert wish.timeout_s is not None and world.loop.time() >= self.asked_at + wish.timeout_s - 1e-6
            self.end = "late"
        except RequestFailedError as error:
            self._check_failure(error)
            if "no other suspect" in str(error):
                await self._ask_again()
            self.end = "failed"
        except CoreDiedError as error:
            assert world.may_end, f"the engine died of {len(world.deaths)} deaths: {error}"
            self.end = "died"
        self.ended_at = world.loop.time()
        world.log(wish.name, self.end)

    async def _ask_again(self) -> None:
        """As client libraries do behind a 500: it is not computed again."""
        began = self._world.loop.time()
        try:
            await self._ask()
        except (RequestFailedError, CoreDiedError) as error:
            # At once, but for messages' way to the hub and back.
            soon = self._world.loop.time() - began < (0.1 if self._world.doors.count == 1 else 2.0)
            known = isinstance(error, RequestFailedError) and soon
            assert known or self._world.may_end, f"what kills was computed again: {error}"
        else:
            raise AssertionError("what kills was computed again")

    def _check_failure(self, error: EngineError) -> None:
        wish = self.wish
        ours = {KILLER, POISON, FAULTY} & {*wish.prompt} or wish.adapter == BROKEN
        # Whom kills from outside hit again and again looks like one who kills.
        if "no other suspect" in str(error):
            ours = {KILLER} & {*wish.prompt}
        unlucky = self._world.kills_from_outside and len(self._world.deaths) >= 3
        assert ours or (unlucky and "no other suspect" in str(error)), f"a good request failed: {error}"

    async def _ask(self) -> None:
        wish, world = self.wish, self._world
        self.asked_at, self.serving = world.loop.time(), world.serving_of(self)
        prompt = [10**6] if wish.is_invalid else wish.prompt
        admitted = await self.serving.admit_async(
            parse_prompt(prompt), wish.params, self.request_id, wish.priority, wish.salt, tenant=wish.tenant
        )
        message = replace(admitted.message, grammar=wish.grammar, lora_request=adapter(wish.adapter))
        admitted = replace(admitted, message=message)
        self.message = message
        world.log(wish.name, "asks")
        leaver = None
        if wish.leaves == "aborts":
            leaver = world.loop.call_later(wish.leaves_after, self._abort)
        try:
            await self._follow(admitted)
        finally:
            if leaver is not None:
                leaver.cancel()

    def _abort(self) -> None:
        self._world.log(self.wish.name, "aborts")
        self.aborted = True
        self.serving.abort(self.request_id)

    async def _follow(self, admitted: AdmittedRequest) -> None:
        wish, world = self.wish, self._world
        expected = self._expected(admitted.message)
        with self.serving.stream(
            admitted, self.asked_at, delta=wish.delta, final_only=wish.final_only, timeout_s=wish.timeout_s
        ) as stream:
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                self._take(output, expected)
                world.log(wish.name, "has", [part.token_ids for part in output.outputs])
                if wish.pause_s:
                    await asyncio.sleep(wish.pause_s)
                if wish.leaves == "closes" and world.loop.time() > self.asked_at + wish.leaves_after:
                    self.end = "left"
                    return
        self._check_whole(output, expected)
        self.end = "whole" if not self.aborted else "aborted"

    def _most(self) -> float:
        """Tokens that anybody can compute for it."""
        wish, world = self.wish, self._world
        if not {KILLER, FAULTY} & {*wish.prompt}:
            return math.inf
        speculation = world.config.scheduler.speculation
        drafts = speculation.num_speculative_tokens if speculation.method or wish.grammar else 0
        return float(world.bad_at(wish.prompt) + 1 + drafts)

    def _take(self, output: RequestOutput, expected: list[tuple[list[int], str]]) -> None:
        for part in output.outputs:
            had = self.parts.get(part.index, [])
            now = had + part.token_ids if self.wish.delta else list(part.token_ids)
            assert part.index not in self._ended or now == had, "more after the end"
            wanted, reason = expected[part.index]
            assert now[: len(had)] == had, f"taken back: {had} and then {now}"
            assert now == wanted[: len(now)], f"sample {part.index} has {now} of {wanted}"
            assert not now or len(self.wish.prompt) + len(now) <= self._most(), "it was given what nobody can compute"
            self.parts[part.index] = now
            before = self._texts.get(part.index, "")
            text = before + part.text if self.wish.delta else part.text
            assert text.startswith(before), f"text taken back: {before!r} and then {text!r}"
            self._texts[part.index] = text
            if part.finish_reason is not None and part.finish_reason != "abort":
                assert part.finish_reason == reason, f"{part.finish_reason}, {reason} was expected"
                assert now == wanted, f"sample {part.index} ended with {now} of {wanted}"
                self._ended[part.index] = reason

    def _check_whole(self, output: RequestOutput, expected: list[tuple[list[int], str]]) -> None:
        """All that there is to have."""
        if self.aborted:
            return
        for index, (wanted, reason) in enumerate(expected):
            assert self._ended.get(index) == reason, f"sample {index} of {self.wish.name} never ended"
            assert self.parts.get(index, []) == wanted
            counts = len(wanted) > (self.message.params.min_tokens if self.message and not self.message.beams else 0)
            stopped = reason == "stop" and counts and wanted[-1] in self._stop
            text = self.serving.tokenizer.backend.decode(wanted[: len(wanted) - bool(stopped)])
            assert self._texts.get(index, "") == text, f"{wanted} was shown as {self._texts.get(index)!r}"
        if self.wish.params.prompt_logprobs is not None and not self.wish.delta:
            given = output.prompt_logprobs
            assert given is not None and len(given) == len(self.wish.prompt), "log-probabilities of the whole prompt"
            positions = [-round(next(iter(each.values())).logprob) for each in given[1:] if each]
            assert positions == list(range(1, len(self.wish.prompt))), "each position once"

    def _expected(self, message: AddRequest) -> list[tuple[list[int], str]]:
        """What it would be given alone."""
        wish, prompt = self.wish, message.prompt_token_ids
        total = len(prompt) + message.max_tokens
        self._stop = stop = set(message.params.stop_token_ids)
        if message.beams is not None:
            found = search(prompt, total, stop, message.beams, wish.grammar, wish.adapter)
            count = len(message.request_ids)
            pairs = [(each.token_ids, "stop" if each.stopped else "length") for each in found[:count]]
            return pairs + [([], "length")] * (count - len(pairs))
        seeds = [message.params.seed, *(each.seed for each in message.followers)]
        least = message.params.min_tokens
        return [generate(prompt, total, stop, least, seed, wish.grammar, wish.adapter) for seed in seeds]
