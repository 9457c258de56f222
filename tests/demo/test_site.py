from pathlib import Path

from gateway import profiles, settings
from gateway.demo.scenario import SIZES
from gateway.demo.site import MODEL, PROFILES, config_text

URLS = {name: f"http://127.0.0.1:{9001 + number}" for number, name in enumerate(PROFILES)}
SHIPPED = Path(__file__).parents[2] / "config" / "demo.yaml"


def test_the_configuration_is_valid_and_routes_as_the_shipped_demo_file(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(config_text(URLS))
    mine = settings.load(tmp_path / "demo.yaml").policy()
    shipped = settings.load(SHIPPED).policy()
    assert (mine.models, mine.pools, mine.backends) == (shipped.models, shipped.pools, shipped.backends)
    assert mine.model(MODEL) is not None


def test_the_rush_fills_both_replicas_and_the_long_document_fits() -> None:
    full = SIZES["full"]
    light, push = profiles.load("h100-tp1-light").capacity, profiles.load("h100-tp2-push").capacity
    assert all(size.rush > 2 * light.knee[0].seqs for size in SIZES.values())
    assert full.manual_tokens * 1.25 < push.context_tokens
