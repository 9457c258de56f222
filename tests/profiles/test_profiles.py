"""The shipped profiles: ten systems and any other, every figure with where it comes from, as documented."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from gateway import profiles
from gateway.core.backends import KneeStep
from gateway.core.kv import KvFormula
from gateway.core.profile import Basis, Profile, Provenance

DOCS = Path(__file__).parents[2] / "docs"
TEN = (
    "h100-tp1-light",
    "h100-tp2-push",
    "h200-fp8",
    "h200-bf16",
    "spark-fp8",
    "spark2-fp8",
    "spark-nvfp4",
    "spark-moe-fp8",
    "spark-moe-fp8-mtp",
    "tpu-v6e4-moe",
)
GENERIC = "generic"


def test_the_ten_systems_ship_and_one_profile_for_any_other() -> None:
    assert profiles.names() == tuple(sorted((*TEN, GENERIC)))


def test_what_nobody_has_published_is_called_a_guess() -> None:
    profile = profiles.load(GENERIC)
    assert {told.basis for told in profile.provenance.values()} == {Basis.GUESSED}
    assert profile.quirks == ("max_completion_tokens_ignored",)
    assert profile.capacity.kv_blocks is None


def test_an_unknown_profile_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(KeyError, match="h100-tp1-light"):
        profiles.load("h100")


@pytest.mark.parametrize("name", (*TEN, GENERIC))
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    profile = profiles.load(name)
    for path in profiles.PATHS:
        if path == "boot_s" and profile.boot_s is None:
            continue  # nobody published it: there is no source to name
        assert profile.provenance[path].source
    for index in range(len(profile.capacity.knee)):
        assert profile.provenance[f"capacity.knee.{index}"].source


def test_the_paths_are_all_figures_there_are() -> None:
    profile = profiles.load("h100-tp1-light")
    paths = {"boot_s", "boot_budget_s"}
    for part in ("capacity", "modalities", "flags", "perf"):
        paths |= {f"{part}.{one.name}" for one in fields(getattr(profile, part))}
    assert set(profiles.PATHS) == paths


@pytest.mark.parametrize("name", TEN)
def test_a_profile_is_plausible(name: str) -> None:
    profile = profiles.load(name)
    capacity = profile.capacity
    assert profile.name == name
    assert profile.title and profile.hardware and profile.checkpoint and profile.served_model
    assert capacity.knee[-1].prompt_tokens_max is None
    seqs = [step.seqs for step in capacity.knee]
    assert seqs == sorted(seqs, reverse=True), "a longer prompt never raises the knee"
    assert capacity.kv is not None and capacity.kv_blocks is not None
    assert capacity.kv.blocks(capacity.context_tokens) <= capacity.kv_blocks * capacity.kv_budget
    assert profile.flags.max_num_seqs is None or seqs[0] <= profile.flags.max_num_seqs
    assert profile.boot_s is None or profile.boot_s < profile.boot_budget_s


@pytest.mark.parametrize(
    ("name", "context", "knee", "blocks", "budget_s"),
    [
        pytest.param("h100-tp1-light", 32_768, (64, 32, 12), 324_032, 600, id="light"),
        pytest.param("h100-tp2-push", 262_144, (96, 64, 40, 24), 933_361, 600, id="push"),
        pytest.param("h200-fp8", 32_768, (128, 64, 24), 452_340, 600, id="h200-fp8"),
        pytest.param("h200-bf16", 32_768, (128, 32, 12), 227_820, 600, id="h200-bf16"),
        pytest.param("spark-fp8", 65_536, (4, 4, 1), 525_000, 600, id="spark-fp8"),
        pytest.param("spark-nvfp4", 65_536, (4, 4, 1), 236_220, 600, id="spark-nvfp4"),
        pytest.param("tpu-v6e4-moe", 16_384, (64,), 450_000, 1_800, id="tpu"),
    ],
)
def test_the_figures_routing_rests_on(
    name: str, context: int, knee: tuple[int, ...], blocks: int, budget_s: float
) -> None:
    profile = profiles.load(name)
    assert profile.capacity.context_tokens == context
    assert tuple(step.seqs for step in profile.capacity.knee) == knee
    assert profile.capacity.kv_blocks == blocks
    assert profile.boot_budget_s == budget_s


@pytest.mark.parametrize(
    ("name", "logged_tokens"),
    [
        pytest.param("h100-tp1-light", 84_992, id="light-85K"),
        pytest.param("h100-tp2-push", 244_816, id="push-244K"),
        pytest.param("h200-fp8", 120_624, id="h200-fp8"),
        pytest.param("h200-bf16", 60_752, id="h200-bf16"),
    ],
)
def test_kv_pools_follow_from_the_logged_tokens(name: str, logged_tokens: int) -> None:
    capacity = profiles.load(name).capacity
    assert capacity.kv is not None
    assert capacity.kv.total_blocks(logged_tokens) == capacity.kv_blocks


def test_a_curve_is_as_strong_as_its_weakest_step() -> None:
    provenance = profiles.load("h100-tp1-light").provenance
    assert [provenance[f"capacity.knee.{index}"].basis for index in range(3)] == [
        Basis.MEASURED,
        Basis.DERIVED,
        Basis.FITTED,
    ]
    assert provenance["capacity.knee"].basis is Basis.FITTED


# ------------------------------------------------------------------ a site's own figures


def test_an_override_changes_its_figure_and_its_source_and_nothing_else() -> None:
    base = profiles.load("h100-tp1-light")
    told = Provenance(Basis.MEASURED, "our own sweep")
    knee = (KneeStep(None, 40),)
    own = profiles.override(base, "light-40", {"capacity.knee": profiles.Figure(knee, told)})
    assert own.name == "light-40"
    assert own.capacity.knee == knee
    assert own.provenance["capacity.knee"] == told
    assert "capacity.knee.0" not in own.provenance, "the steps' own sources went with them"
    assert own.capacity.kv_blocks == base.capacity.kv_blocks
    assert own.provenance["perf.t_mem"] == base.provenance["perf.t_mem"]
    assert (own.perf, own.flags, own.quirks) == (base.perf, base.flags, base.quirks)


def test_an_override_can_name_another_geometry_and_texts() -> None:
    told = Provenance(Basis.GUESSED, "site configuration")
    formula = KvFormula(sliding_layers=0, global_layers=30)
    own = profiles.override(
        profiles.load("spark-moe-fp8"),
        "moe",
        {"capacity.kv": profiles.Figure(formula, told)},
        {"title": "Ours"},
    )
    assert own.capacity.kv == formula
    assert own.title == "Ours"


def test_an_override_of_no_figure_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"capacity\.knees"):
        profiles.override(profiles.load("spark-fp8"), "x", {"capacity.knees": profiles.Figure(1, None)})


@pytest.mark.parametrize("written", ["2000", "< 2000", "<= 2K", ""], ids=["bare", "below", "unit", "empty"])
def test_an_upper_end_has_one_spelling(written: str) -> None:
    from gateway.profiles.figures import prompt_tokens_max

    with pytest.raises(ValueError, match="<= 2000"):
        prompt_tokens_max(written)


# ------------------------------------------------------------------ documentation


def test_every_quirk_is_known_and_documented() -> None:
    used = {quirk for name in TEN for quirk in profiles.load(name).quirks}
    assert used <= set(profiles.QUIRKS)
    text = (DOCS / "profiles.md").read_text(encoding="utf-8")
    for quirk, sentence in profiles.QUIRKS.items():
        where = ", ".join(f"`{name}`" for name in TEN if quirk in profiles.load(name).quirks)
        written = sentence.replace("|", "\\|")  # what would end the cell of the table
        assert f"| `{quirk}` | {written} | {where or '-'} |" in text


@pytest.mark.parametrize("name", TEN)
def test_the_table_of_systems_is_the_data(name: str) -> None:
    assert _row(profiles.load(name)) in (DOCS / "profiles.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", TEN)
def test_every_source_tag_is_explained(name: str) -> None:
    known = set(re.findall(r"^\| ([A-Z-]+) \|", _measurements(), re.M))
    assert {"OPR", "OPR-B", "LDI", "DSF", "DSN", "TPU", "TPU-S"} <= known
    for told in profiles.load(name).provenance.values():
        assert set(re.findall(r"\b(OPR(?:-B)?|LDI|DSF|DSN|TPU-S)\b", told.source)) <= known


def test_every_link_into_the_measurements_leads_to_a_heading() -> None:
    anchors = {
        heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", _measurements(), re.M)
    }
    root = DOCS.parent
    texts = [*root.glob("gateway/**/*.py"), *root.glob("gateway/**/*.yaml"), *root.glob("config/*.yaml")]
    for file in (*texts, *DOCS.glob("*.md"), root / "README.md"):
        linked = set(re.findall(r"measurements\.md#([a-z0-9-]+)", file.read_text(encoding="utf-8")))
        assert linked <= anchors, file


def _measurements() -> str:
    return (DOCS / "measurements.md").read_text(encoding="utf-8")


def _row(profile: Profile) -> str:
    def letter(path: str) -> str:
        return profile.provenance[path].basis.value[0].upper()

    def most(value: int | None) -> str:
        return "any" if value is None else str(value) if value else "none"

    capacity, modalities = profile.capacity, profile.modalities
    knee = " / ".join(
        f"{step.seqs} {letter(f'capacity.knee.{index}')}" for index, step in enumerate(capacity.knee)
    )
    boot = "-" if profile.boot_s is None else f"{profile.boot_s:.0f} {letter('boot_s')}"
    cells = (
        f"`{profile.name}`",
        profile.title,
        f"{capacity.context_tokens:,} {letter('capacity.context_tokens')}",
        knee,
        f"{capacity.kv_blocks:,} {letter('capacity.kv_blocks')}",
        f"{most(modalities.images_max)} {letter('modalities.images_max')}, "
        f"{most(modalities.audios_max)} {letter('modalities.audios_max')}",
        f"{boot}, {profile.boot_budget_s:.0f} {letter('boot_budget_s')}",
        f"{profile.perf.lone_tokens_per_s():.1f}",
    )
    return f"| {' | '.join(cells)} |"
