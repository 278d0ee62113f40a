"""A router that knows only the published events foresees how much of each prompt is cached."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from tiny_families import save_tiny

from engine import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "core"))
from kv_consumer import AllBlocksCleared, BlockRemoved, BlockStored, Consumer

BLOCK_BYTES = 2 * 16 * 2 * 16 * 4 * 3
SIZE = 16


class Router:
    def __init__(self, directory: Path) -> None:
        self.consumer, self.next = Consumer(directory), 0
        self.names: dict[tuple[object, str, tuple[int, ...]], bytes | int] = {}
        """by the block before, or the salt, and the tokens"""
        self.held: dict[str | None, set[bytes | int]] = {"GPU": set(), "CPU": set()}
        self.seen: set[str | None] = set()
        """where something was ever stored"""

    def catch_up(self) -> None:
        for number, batch in self.consumer.replay(self.next):
            assert number == self.next
            self.next += 1
            for event in batch.events:
                match event:
                    case BlockStored():
                        self.learn(event)
                    case BlockRemoved():
                        self.held[event.medium] -= set(event.block_hashes)
                    case AllBlocksCleared():
                        self.held = {"GPU": set(), "CPU": set()}

    def learn(self, event: BlockStored) -> None:
        self.held[event.medium] |= set(event.block_hashes)
        self.seen.add(event.medium)
        assert event.extra_keys is not None
        parent = event.parent_block_hash
        for index, (name, extra) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
            tokens = tuple(event.token_ids[index * SIZE : (index + 1) * SIZE])
            self.names[parent, extra[0] if extra else "", tokens] = name
            parent = name

    def foresees(self, prompt: list[int], salt: str | None) -> int:
        """Tokens of the prompt that are cached, but for the last one, which is always computed."""
        held, parent, count = self.held["GPU"] | self.held["CPU"], None, 0
        while count + SIZE < len(prompt):
            name = self.names.get((parent, salt or "" if count == 0 else "", tuple(prompt[count : count + SIZE])))
            if name not in held:
                break
            parent, count = name, count + SIZE
        return count


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_what_the_events_foretell_is_what_a_request_finds(tmp_path: Path, num_host_blocks: int) -> None:
    save_tiny("Llama", tmp_path / "model")
    rng = random.Random(0)
    heads = [[rng.randrange(3, 400) for _ in range(96)] for _ in range(4)]
    found = 0
    with LLM(
        str(tmp_path / "model"),
        dtype="float32",
        device="cpu",
        max_model_len=200,
        compile="none",
        kv_cache_memory=20 * BLOCK_BYTES,
        swap_space=num_host_blocks * BLOCK_BYTES,
        kv_events_config={
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": f"ipc://{tmp_path}/replay",
        },
    ) as llm:
        router = Router(tmp_path)
        for turn in range(60):
            prompts = []
            for _ in range(rng.choice((1, 1, 3))):
                salt = rng.choice((None, None, "tenant"))
                prompt = rng.choice(heads)[: rng.randrange(1, 97)] + [rng.randrange(3, 400) for _ in range(20)]
                prompts.append({"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})})
            router.catch_up()
            expected = router.foresees(prompts[0]["prompt_token_ids"], prompts[0].get("cache_salt"))
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 40), ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert outputs[0].num_cached_tokens == expected
            found += expected
            if turn % 25 == 24:
                llm.reset_prefix_cache()
                llm.generate({"prompt_token_ids": [3]}, params, use_tqdm=False)  # behind the reset
        router.consumer.close()
    assert found > 500 and router.seen == ({"GPU", "CPU"} if num_host_blocks else {"GPU"})
