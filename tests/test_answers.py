"""README's answers are those of its stored studies: every mean, interval and verdict, computed again."""

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
import torch

from mhar_minimal import Model
from mhar_minimal.ablate import read_plan, read_study
from mhar_minimal.cpt import read_cpt
from mhar_minimal.stats import paired_differences, readings, tail_mean

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "notebooks" / "results"
ANSWERS = (
    (ROOT / "README.md").read_text(encoding="utf-8").partition("## Questions and answers")[2].partition("\n## ")[0]
)


def answer(question):
    """What README's table says where the question begins so."""
    [line] = [line for line in ANSWERS.splitlines() if line.startswith(f"| {question}")]
    return line.split("|")[2]


def said(difference, digits=3):
    mean, low, high = (f"{x:+.{digits}f}".replace("-", "−") for x in (difference.mean, *difference.t_interval))
    return f"{mean} ({low} to {high})"


def tail_means(cells, name):
    return {name(cell): {seed: tail_mean(rows, 5) for seed, rows in of.items()} for cell, of in cells.items()}


def eight_minus_one(losses):
    """Of tail means by (heads, level): the effect of eight heads by level and seed."""
    return {at: {s: losses[8, at][s] - one for s, one in of.items()} for (H, at), of in losses.items() if H == 1}


def test_the_readmes_answers_are_those_of_the_recorded_study():
    """Means, intervals and verdicts, computed again from results.csv and timing.csv."""
    study, plan = RESULTS / "study_h200", read_plan(RESULTS / "study_h200" / "plan.toml")
    runs = {(cell.residual, cell.heads): seeds for cell, seeds in read_study(study)["main"].items()}
    losses = tail_means(runs, lambda arm: arm)
    standard, hyper = ("standard", 1), ("hyper", 1)
    [one] = {trial.recipe.steps for trial in plan.trials("main")}
    about, text = json.loads((study / "study.json").read_text()), " ".join(ANSWERS.split())
    with torch.device("meta"):
        millions = Model(plan.trials("main")[0].config).parameter_count() / 1e6
    assert f"{millions:.1f} M parameters, 16 sublayers, {one} steps of 8192 bytes" in text
    minutes = sum(session["seconds"] for session in about["sessions"] if session["git"].startswith("c992404")) / 60
    assert f"--only main`, {math.ceil(minutes)} minutes;" in text

    d = paired_differences(losses, standard)
    assert [arm for arm, x in d.items() if x.t_interval[1] < 0] == [("full", 1), ("block", 8)]
    assert answer("Does Full AttnRes with one head").strip() == f"yes: {said(d['full', 1])}"
    assert f"one head: not distinguishable, {said(d['block', 1])}; eight heads: below, {said(d['block', 8])}" in answer(
        "And Block AttnRes"
    )
    d = paired_differences({arm: losses[arm] for arm in (hyper, ("full", 1), ("block", 1))}, hyper)
    assert all(x.t_interval[1] < 0 for x in d.values())
    assert answer("And one head below").strip() == f"yes: Full {said(d['full', 1])}, Block {said(d['block', 1])}"

    found = {}
    for scheme in ("full", "block"):
        found |= paired_differences({arm: x for arm, x in losses.items() if arm[0] == scheme}, (scheme, 1))
    counts = {2: "two", 4: "four", 8: "eight", 16: "sixteen"}
    by_scheme = {s: ", ".join(f"{word} {said(found[s, H])}" for H, word in counts.items()) for s in ("full", "block")}
    assert all(x.t_interval[0] > 0 for (scheme, _), x in found.items() if scheme == "full")
    assert all(x.t_interval[0] < 0 < x.t_interval[1] for (scheme, _), x in found.items() if scheme == "block")
    assert answer("Do several heads").strip() == f"no, **above**: {by_scheme['full']}"
    assert answer("And under Block").strip() == f"not distinguishable: {by_scheme['block']}"
    seen = [x.detectable for x in found.values()]
    assert f"{min(seen):.3f} to {max(seen):.3f} with power 0.8" in text
    sixteen, eight = (-found["block", H].t_interval[0] for H in (16, 8))
    assert f"a gain of up to {sixteen:.3f} with sixteen ({eight:.3f} with eight) is not excluded" in text

    equal = {}
    for arm in (("full", 1), ("full", 8)):
        pairs = {s: readings(runs[arm][s], runs[standard][s])["seconds"] for s in range(5)}
        both = {arm: {s: a for s, (_, a, _) in pairs.items()}, standard: {s: b for s, (_, _, b) in pairs.items()}}
        equal |= paired_differences(both, standard, alpha=0.05 / 11)
    wanted = f"one head: not distinguishable, {said(equal['full', 1])}; eight heads: behind, "
    wanted += f"{said(equal['full', 8], 4)}, "
    assert answer("Is Full ahead").strip().startswith(wanted)


def test_the_readmes_answers_on_what_the_effect_hangs_on_are_those_of_the_side_grids():
    study = read_study(RESULTS / "study_h200")
    effect = eight_minus_one(tail_means(study["init"], lambda c: (c.heads, (c.query_init, c.corpus))))
    start = {
        s: fmean(effect["random", text][s] - effect["zero", text][s] for text in ("code", "prose")) for s in range(3)
    }
    text = {s: fmean(effect[at, "prose"][s] - effect[at, "code"][s] for at in ("zero", "random")) for s in range(3)}
    both = {
        s: x - effect["random", "code"][s] - effect["zero", "prose"][s] + effect["zero", "code"][s]
        for s, x in effect["random", "prose"].items()
    }
    by_level, apart = (paired_differences(x, None) for x in (effect, {"start": start, "text": text, "both": both}))
    zero, turned = (said(by_level[at]).replace(" ", "** ", 1) for at in (("zero", "code"), ("random", "prose")))
    between = [by_level[at] for at in (("random", "code"), ("zero", "prose"))]
    wanted = f"its sign differs between zero queries on code, **{zero}, and random queries on prose, **{turned}; "
    wanted += f"random on code {said(between[0])}, zero on prose {said(between[1])}. Contrasts: the start "
    wanted += f"{said(apart['start'])}, the text {said(apart['text'], 4)}, which one comparison more "
    assert answer("Does the effect of eight heads depend on the start").strip().startswith(wanted)
    assert by_level["zero", "code"].t_interval[0] > 0 > by_level["random", "prose"].t_interval[1]
    assert apart["start"].t_interval[1] < 0 > apart["text"].t_interval[1]
    more = paired_differences({"start": start, "text": text, "both": both, "one more": start}, None)
    assert more["start"].t_interval[1] < 0 < more["text"].t_interval[1]
    assert all(low < 0 < high for low, high in (d.t_interval for d in between))
    for corpus in ("code", "prose"):
        cells = {cell: of for cell, of in study["init"].items() if cell.corpus == corpus}
        found = paired_differences(tail_means(cells, lambda c: (c.heads, c.query_init)), (1, "zero"))
        assert not any(d.t_interval[1] < 0 for d in found.values())  # nowhere shown to be below one head from zero
    words = " ".join(ANSWERS.split())
    cost, low, high = (f"{x:.3f}" for x in (found[1, "random"].mean, *found[1, "random"].t_interval))
    assert f"On prose a random start cost one head {cost} ({low} to {high})" in words
    best = found[8, "random"]
    assert f"from random ones, they are {said(best)}, and less than {best.detectable:.3f} would have gone" in words

    effect = eight_minus_one(tail_means(study["kv"], lambda c: (c.heads, c.kv_heads)))
    d = paired_differences(effect, 1)
    assert all(low < 0 < high for low, high in (x.t_interval for x in d.values()))
    wanted = f"not distinguishable: two instead of one {said(d[2])}, six instead of one {said(d[6])}"
    assert answer("And on the number of kv heads").strip() == wanted

    mixings = tail_means(study["variants"], lambda c: c.mixing)
    d = paired_differences(mixings, "softmax")
    assert all(low < 0 < high for low, high in (x.t_interval for x in d.values()))
    names = ("sigmoid", "no key norm", "input-independent weights", "input-dependent query")
    arms = ("sigmoid", "no_key_norm", "input_independent", "input_dependent")
    wanted = "not distinguishable: " + ", ".join(f"{name} {said(d[arm])}" for name, arm in zip(names, arms))
    wanted = (
        wanted.replace("input-dependent query ", "input-dependent query, with 2.5 M parameters more, ") + ". The window"
    )
    assert answer("Is another mixing better").strip().startswith(wanted)
    assert min(mixings["window"].values()) > 1 + max(mixings["softmax"].values())


def test_the_readmes_answers_on_the_rate_are_those_of_their_studies():
    rates, means, above, best = (3e-4, 6e-4, 9e-4, 1.8e-3), {}, {}, set()
    study = read_study(RESULTS / "rates_h200")["main"]
    for scheme in ("full", "block"):
        losses = tail_means({c: of for c, of in study.items() if c.residual == scheme}, lambda c: (c.heads, c.lr))
        best |= {min((fmean(of.values()), lr) for (h, lr), of in losses.items() if h == heads)[1] for heads in (1, 8)}
        effect = eight_minus_one(losses)
        found = paired_differences(effect | {"each best": effect[6e-4]}, None)
        means[scheme] = ", ".join(f"{found[lr].mean:+.3f}" for lr in rates)
        above[scheme] = [lr for lr in rates if found[lr].t_interval[0] > 0]
        assert not any(d.t_interval[1] < 0 for d in found.values())
        assert all(low < 0 < high for low, high in (d.t_interval for d in paired_differences(effect, 3e-4).values()))
    assert (above, best) == ({"full": [3e-4, 9e-4], "block": [3e-4]}, {6e-4})
    wanted = "no flip was seen: at 3e-4, 6e-4, 9e-4, 1.8e-3 eight heads minus one "
    wanted += (
        f"{means['full']} under Full, {means['block']} under Block; above at 3e-4 (both) and 9e-4 (Full), else not "
    )
    wanted += "distinguishable, as at 6e-4, the best rate of all four arms; nor are the effects from each other"
    assert answer("Does the effect of eight heads depend on the learning").strip() == wanted

    losses = tail_means(read_study(RESULTS / "rates_cpu")["main"], lambda c: (c.heads, c.lr))
    found = paired_differences(eight_minus_one(losses), None)
    assert [lr for lr, d in found.items() if d.t_interval[1] < 0] == [1e-2]
    assert not any(d.t_interval[0] > 0 for d in found.values())
    assert paired_differences(eight_minus_one(losses), 3e-4)[1e-2].t_interval[1] < 0
    high, middle, low, lowest = (said(found[lr]) for lr in (1e-2, 3e-3, 1e-3, 3e-4))
    wanted = (
        f"the effect does: eight heads minus one {high} at 1e-2, not distinguishable at 3e-3, where both arms are at "
        "their best, "
    )
    wanted += f"{middle}, at 1e-3, {low}, and at 3e-4, {lowest}"
    assert answer("And in a model of 0.2 M").strip() == wanted
    for heads in (1, 8):
        assert min((fmean(of.values()), lr) for (h, lr), of in losses.items() if h == heads)[1] == 3e-3


@pytest.mark.parametrize(
    ("name", "question", "digits"), [("cpt_cpu", "Does a branch", 4), ("cpt_h200", "And one gra", 6)]
)
def test_the_readmes_answers_are_those_of_the_recorded_pairs(name, question, digits):
    study = read_cpt(RESULTS / name)
    last = {arm: {seed: rows[-1].val_loss for seed, rows in of.items()} for arm, of in study.rows.items()}
    last["base"] = {seed: rows[0].val_loss for seed, rows in study.rows["plain"].items()}
    branch = paired_differences(last, "plain")["mhar"]
    training = paired_differences(last, "base")["plain"]
    assert branch.t_interval[0] < 0 < branch.t_interval[1]
    wanted = f" not distinguishable: {said(branch, digits)}; training alone {said(training)}."
    assert answer(question).startswith(wanted)
    assert study.about["sessions"][-1]["command"].partition(" --out")[0] in ANSWERS


def ranged(values, digits):
    low, high = (f"{x:.{digits}f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def test_the_readmes_kernel_tables_are_the_stored_rows():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The kernels")[2].partition("\n## ")[0]
    rows = {
        line.split("|")[1].strip(): [x.strip() for x in line.split("|")[2:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    parts = json.loads((RESULTS / "kernels_h200.json").read_text())["parts"]
    routing = [row for part in parts for row in part.get("routing", [])]
    training = [row for part in parts for row in part.get("training", [])]

    def newest(rows, **wanted):
        return [row for row in rows if all(row[k] == v for k, v in wanted.items())][-1]

    settings = {"100M": 12, "350M": 24, "1B": 36}
    for name, wanted in {
        "the definition, eager": dict(impl="eager", heads=8),
        '`impl="fused"`': dict(impl="fused", heads=8),
        '`impl="two_phase"`': dict(impl="two_phase", heads=8, norms="none"),
        "the same, the sublayers' norms included": dict(impl="two_phase", heads=8, norms="fused"),
        '`impl="two_phase"`, one head': dict(impl="two_phase", heads=1, norms="none"),
    }.items():
        found = [newest(routing, setting=setting, **wanted)["fwdbwd_ms"] for setting in settings]
        assert rows[name] == [f"{ms:.1f} ms" for ms in found], name
    floors = [
        {row["setting"]: row["fewest_bytes_fwdbwd"] / part["copy_tb_per_s"] / 1e9 for row in part.get("routing", [])}
        for part in parts
    ]
    for floor in filter(None, floors):
        assert all(
            rows["the fewest bytes ÷ copy bandwidth"][list(settings).index(x)] == f"{floor[x]:.1f} ms" for x in floor
        )
    for name, (mode, recorded) in {
        "eager, launched from Python": ("eager", False),
        "eager, recorded as a CUDA graph": ("eager", True),
        "`torch.compile`, recorded": ("compiled", True),
        "`torch.compile`, launched from Python": ("compiled", False),
    }.items():
        own = dict(scheme="two_phase", mode=mode, recorded=recorded, recompute=False)
        found = [newest(training, setting=setting, layers=layers, **own) for setting, layers in settings.items()]
        assert rows[name][:-1] == [f"{row['speed_ratio']:.2f}" for row in found], name
        assert rows[name][-1] == ranged([row["memory_ratio"] for row in found], 2) + " ×", name
