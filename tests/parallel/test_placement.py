"""Placements of experts: balanced by what each was given, kept in files, and used by the next start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from place_experts import loads_of, logged_loads, main
from test_tensor_parallel import FIVE, WHOLE, args_of, greedy
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine.errors import ConfigError
from engine.models.placement import ExpertPlacement, balanced, exchanges, imbalance, read_placement, write_placement
from engine.resolve import resolve_here

LAYERS = st.integers(1, 9).flatmap(
    lambda size: st.tuples(
        st.just(size), st.lists(st.lists(st.integers(0, 1000), min_size=size, max_size=40), min_size=1, max_size=3)
    )
)


@given(LAYERS)
def test_every_rank_has_as_many_experts_and_work_apart_by_no_more_than_one_expert(
    case: tuple[int, list[list[int]]],
) -> None:
    size, loads = case
    placement = balanced(loads, size)
    placement.check([len(layer) for layer in loads], size)
    for layer, of_layer in enumerate(loads):
        own = [placement.own(layer, len(of_layer), rank, size) for rank in range(size)]
        assert sorted(expert for each in own for expert in each) == list(range(len(of_layer)))
        assert max(map(len, own)) - min(map(len, own)) <= 1
        work = [sum(of_layer[expert] for expert in each) for each in own]
        assert max(work) - min(work) <= max(of_layer) + len(of_layer) * (sum(work) // (256 * size))


def test_the_busiest_experts_do_not_meet() -> None:
    loads = [[100, 90, 3, 2, 1], [], [0, 0, 0, 0]]
    assert balanced(loads, 2) == ExpertPlacement(((1, 0, 0, 0, 1), (), (0, 0, 1, 1)))
    assert imbalance(balanced(loads, 2), loads, 2) < 1.05 < 1.9 < imbalance(ExpertPlacement(), loads, 2)
    with pytest.raises(ConfigError, match="2 experts are too few for 3 ranks"):
        balanced([[5, 5]], 3)


def test_nothing_moves_for_little() -> None:
    assert exchanges((0, 0, 1, 1), [1000, 1003, 1000, 1000], 2) == []
    assert exchanges((0, 0, 1, 1), [1000, 1900, 1000, 100], 2) == [(0, 3)]
    assert exchanges((1, 0, 0, 1), [1000, 1900, 1000, 100], 2) == [(1, 0)], "from where they are"
    assert exchanges((0, 0, 0), [5, 5, 5], 1) == [] == exchanges((), [], 2)


def test_loads_are_read_from_a_log() -> None:
    told = "expert loads of replica %d: [[%d, 2], []]\n"
    assert logged_loads("x\n" + told % (0, 1) + told % (1, 7) + "y") == [[7, 2], []]
    with pytest.raises(SystemExit, match="no line 'expert loads of replica"):
        logged_loads("x")


def test_a_placement_is_read_as_it_was_written(tmp_path: Path) -> None:
    placement, file = ExpertPlacement(((0, 1, 0), (), (1, 1, 0))), str(tmp_path / "placement.json")
    write_placement(placement, file)
    assert read_placement(file) == placement
    for text in ("{}", '{"layers": 3}', '{"layers": [["a"]]}', "[]", ""):
        Path(file).write_text(text)
        with pytest.raises(ConfigError, match=r"placement\.json"):
            read_placement(file)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_experts_are_counted_and_placed_and_give_the_same_tokens(tmp_path: Path) -> None:
    save_tiny("Qwen3Moe", tmp_path, **FIVE)
    file = str(tmp_path / "placement.json")
    one = args_of(tmp_path, ranks=1)
    loads = loads_of(one, ["abc", "defgh"], max_tokens=6)
    assert [sum(layer) for layer in loads] == [2 * (3 + 5 + 2 * 5)] * 3, "two experts a token; the last is not given"
    placement = balanced(loads, 2)
    write_placement(placement, file)
    args = args_of(tmp_path, **WHOLE, expert_placement=file)
    assert resolve_here(args)[1].parallel.experts == placement
    found = greedy(args, 8, threads=True)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in greedy(one, 8)]
    with pytest.raises(ConfigError, match="set enable_expert_parallel, too"):
        resolve_here(msgspec.structs.replace(args, enable_expert_parallel=False))
    Path(file).write_text('{"layers": [[0, 1]]}')
    with pytest.raises(ConfigError, match="expert_placement is of 1 layers, and the model has 3"):
        resolve_here(args)


def test_the_tool_passes_over_empty_lines_and_says_what_is_wrong_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("place_experts.loads_of", lambda args, prompts, max_tokens: [[len(prompts), 1, 1]])
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("abc\n\n  \ndefgh\n")
    main(["model", str(prompts), str(out), "--ranks", "2"])
    assert read_placement(str(out)) == balanced([[2, 1, 1]], 2)
    prompts.write_text("\n")
    for file, ranks, message in (
        (prompts, "2", "has no prompts"),
        (prompts, "0", "--ranks must be at least 1, got 0"),
        (tmp_path / "none.txt", "2", "No such file"),
    ):
        with pytest.raises(SystemExit):
            main(["model", str(file), str(out), "--ranks", ranks])
        assert message in capsys.readouterr().err
    prompts.write_text("abc")
    with pytest.raises(SystemExit):
        main(["model", str(prompts), str(out), "--ranks", "4"])
    assert "3 experts are too few for 4 ranks" in capsys.readouterr().err
