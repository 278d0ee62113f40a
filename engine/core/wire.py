"""Messages between the front end and the core: the only place where the two meet. msgspec only; no pickle on any
socket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from engine.adapters.request import LoRARequest
from engine.kv_transfer.params import KVTransferParams
from engine.request import NOBODY, FinishReason, Tenant
from engine.step import RowParams, TokenLogprobs


class Follower(msgspec.Struct, frozen=True, kw_only=True):
    """Another sample of the same prompt, with the same parameters but the seed."""

    request_id: str
    seed: int


def candidates_of(width: int, num_stop_tokens: int) -> int:
    """What each beam of a search of that width brings: with all stop tokens among them, enough are left to go on."""
    return max(2, 1 + num_stop_tokens) * width


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Search instead of sampling: `width` beams, as transformers' `generate` with `num_beams`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class Resumed(msgspec.Struct, frozen=True):
    """What a caller has been given of a sequence that another core has begun. This one goes on behind it."""

    token_ids: list[int] = []
    prompt_logprobs: int = 0
    """positions"""


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A prompt to continue. Where `n` samples of it are wanted, the others are its followers: the prompt is computed
    once, then each goes on by itself, with its own id, seed and end."""

    request_id: str
    prompt_token_ids: list[int]
    params: RowParams
    max_tokens: int
    """already cut to the context length"""
    priority: int = 0
    """lower runs earlier; used by the `priority` policy, and by `fair`"""
    tenant: Tenant = NOBODY
    """whose it is, under the `fair` policy"""
    cache_salt: str | None = None
    """prefix blocks are shared only among requests with an equal salt"""
    followers: list[Follower] = []
    grammar: str | None = None
    """what outputs must match, in llguidance's language: checked before (`engine.grammars.checking`), and behind a
    `Vocabulary`"""
    beams: BeamParams | None = None
    """a search instead of samples: its best sequence is returned under `request_id`, the next under the followers' ids,
    whose parameters do not count; tokens come with the end, all at once"""

    wait_s: float | None = None
    """how long it may wait for its turn; None: for ever"""
    deadline_s: float | None = None
    """in which it is to end, or not to begin; None: it has time"""
    pin: str | None = None
    """keep the whole blocks of the prompt under this name when they are computed, until `UnpinPrefix`"""
    kv_transfer: KVTransferParams | None = None
    """its prompt is computed for another engine, or by one"""
    lora_request: LoRARequest | None = None
    """the adapter that all of it is computed with"""
    accepted: bool = False
    """another core had it, or it waited for one: it is not refused"""
    begun: bool = False
    """callers have been given something of it: it is not given up while it waits"""
    resumed: list[Resumed] = []
    """of each of `request_ids`, or none: it is new. Of a search nothing is given before its end"""

    @property
    def adapter_key(self) -> str | None:
        """Prefix blocks are shared only among requests with an equal one."""
        return None if self.lora_request is None else self.lora_request.key

    @property
    def request_ids(self) -> list[str]:
        """Of all samples, in order."""
        return [self.request_id, *(follower.request_id for follower in self.followers)]


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, tag="vocabulary"):
    """What grammars are made of; comes once, before the first request that has one: taking it in takes long."""

    tokenizer: str
    """tokenizers' JSON"""
    eos_token_ids: list[int]


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Stop at once: what runs is dropped (the front end aborts or drains first)."""


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Forget every cached block that no sequence uses."""


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile"):
    """Record the next steps, unless some are being recorded."""

    path: str
    """what the names of the files begin with"""
    steps: int


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile"):
    """Write what has been recorded."""


class SetLogLevel(msgspec.Struct, frozen=True, kw_only=True, tag="log_level"):
    level: int
    """as in `logging`"""


class UnpinPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="unpin"):
    """A pinned prefix becomes an ordinary cached one. An unknown name is ignored."""

    name: str


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """To replicas that take steps together (`engine.core.rounds`): one of them has been sent a request."""

    number: int
    """one more than the last one's"""


ToCore = (
    AddRequest
    | Vocabulary
    | AbortRequests
    | Shutdown
    | ResetPrefixCache
    | UnpinPrefix
    | Wake
    | StartProfile
    | StopProfile
    | SetLogLevel
)


class SequenceDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta", gc=False):
    """What is new for one request since its last delta. Exactly one delta per request has a finish_reason."""

    request_id: str
    token_ids: list[int] = []
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """complete when the first token arrives: one per prompt token after the first; may come in several deltas"""
    pooled: bytes = b""
    """of a request that is pooled: what `StepResult.pooled` says of its row, float32"""
    pooled_from: int = 0
    """the position at which that chunk begins; 0: what came before does not count (its sequence was preempted)"""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """the token id that ended it; it is the last of `token_ids`"""
    cumulative_logprob: float | None = None
    """of a beam search's result: the sum of its tokens' log-probabilities"""
    score: float | None = None
    """and what it was ranked by: that sum / length ** length_penalty"""
    cached_tokens: int = 0
    """prompt tokens taken from the prefix cache; set on the first delta"""
    started_at: float | None = None
    """with its first tokens: when a step took it up, on `time.monotonic`'s clock, which a machine's processes share"""
    accepted_tokens: int = 0
    """of these tokens, those that were drafts"""
    moved: bool = False
    """another core goes on with it than the one that has begun (`engine.replicas`)"""
    error: str | None = None
    """with finish_reason "error": why"""
    kv_transfer: KVTransferParams | None = None
    """with the end of a request whose prompt another engine wants: where it finds it"""
    error_kind: str | None = None
    """"queue_full" | "too_short" | "invalid" | "fault": which exception the front end raises"""
    retry_after_s: float = 1.0
    """of the first two: when to ask again"""


class TokenDeltas(msgspec.Struct, frozen=True, kw_only=True, tag="tokens", gc=False):
    """One token more for each of many requests: as good as a `SequenceDelta` of each that says nothing else."""

    request_ids: list[str]
    token_ids: list[int]


Delta = SequenceDelta | TokenDeltas


def each_delta(deltas: Iterable[Delta]) -> Iterator[SequenceDelta]:
    for delta in deltas:
        if isinstance(delta, SequenceDelta):
            yield delta
        else:
            for request_id, token in zip(delta.request_ids, delta.token_ids, strict=True):
                yield SequenceDelta(request_id=request_id, token_ids=[token])


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges are as of the step; counters count since the core started."""

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """blocks held by sequences and pins (cached but unreferenced blocks count as free)"""
    kv_blocks_pinned: int = 0
    kv_blocks_cached: int = 0
    """free blocks that are still found by what they hold"""
    steps: int = 0
    preemptions: int = 0
    """sequences"""
    preemptions_swapped: int = 0
    """of them, those whose blocks went to the host tier"""
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    """held by sequences that wait to be swapped in"""
    host_blocks_cached: int = 0
    """findable blocks of the host tier, used or free"""
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    """steps of sequences that computed some"""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """of the drafts, those that were right"""
    accepted_at: list[int] = []
    """of these, how many were a step's first draft of their sequence, its second, and so on"""
    kv_fetches: int = 0
    """prompts of which all that was missing came from another engine"""
    kv_fetch_failures: int = 0
    """prompts of which it did not, so that they were computed here"""
    kv_fetched_bytes: int = 0
    kv_fetch_s: float = 0.0
    """seconds of those fetches"""
    kv_leases: int = 0
    """prompts that wait for another engine to read them"""
    kv_leases_expired: int = 0
    """that nobody read in time"""
    kv_leases_gave_way: int = 0
    """whose blocks were needed before"""
    expert_tokens: int = 0
    """rows that experts of this core computed, one for each choice of a token, where they are divided over replicas"""
    experts_moved: int = 0
    """that came from other replicas while serving"""
    compiles_after_ready: int = 0
    compiling: bool = False
    """steps are computed eagerly until pieces that compile behind them take over"""
    compile_failed: bool = False
    """they did not compile: steps stay eager"""
    profiling: bool = False
    """steps are being recorded"""
    profile_orders: int = 0
    """taken: to begin, to end"""
    core_parts_s: dict[str, float] = {}
    """seconds of the core's thread by part (`step_profile.CORE_PARTS`), since the start"""
    step_parts_s: dict[str, float] = {}
    """and of the runner's: where a device runs behind, the time that its host takes to launch"""
    replicas: int = 1
    """cores that serve"""
    core_deaths: int = 0
    """of cores whose requests went on without them; counted by the front end"""
    asleep: bool = False
    """no core serves, on purpose"""


class StepTaken(msgspec.Struct, frozen=True):
    """A step that is over."""

    seconds: float
    tokens: int
    """computed"""


class KVDigests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of the prefix cache's index since the last time, by the digests of `HashChain`; of layer group 0, and
    of the device and the host tier together. Who follows forgets all if it was `cleared`, then what was `removed` and
    adds what was `stored`; no digest is in both. What came and went in the meantime may be among the removed ones."""

    stored: list[bytes] = []
    removed: list[bytes] = []
    cleared: bool = False


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    deltas: list[Delta]
    stats: CoreStats
    step: StepTaken | None = None
    """that brought them"""
    kv_events: KVDigests | None = None
    """where `CacheConfig.tell_front_end` asks for it and something has changed"""
    aside: bool = False
    """told while a step computes in the loop's thread: no sign that the loop turns"""


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    num_blocks: int
    block_size: int
    max_model_len: int
    attention_backend: str
    ledger: str
    """the memory ledger as printed"""
    distinct_pieces: int
    pieces_compiled: int
    startup_seconds: float
    compiling: bool = False
    """as in `CoreStats`: pieces are not known yet, and are counted nowhere above"""
    kv_layout: dict[str, str] = {}
    """what the bytes of a page mean, of an engine that gives pages to others or takes them"""


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The core's last message before it exits with an error; the last line of `traceback` is the root cause."""

    traceback: str
    kind: str | None = None
    """name of the class in `engine.errors`, where the error is one of ours"""
    message: str = ""


Phase = Literal["start", "idle", "plan", "submit", "collect", "complete"]
"""What the loop is doing; "collect" is waiting for the device."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent by the core's I/O thread while the core has work, so that the front end can tell a hung loop from a slow
    one."""

    turns: int
    """turns of the loop since it started"""
    phase: Phase
    received: int
    """messages received from the front end: "idle" is believed only when none is under way"""
    steps: int = 0
    """steps collected since the start"""
    step_s: float = 0.0
    """what all but one in a hundred of the latest steps took at most"""


FromCore = StepOutputs | CoreReady | CoreFailed | Heartbeat
