"""Fetching from a server that speaks the Hub's API: what comes, what is checked, and what is said when it fails."""

from __future__ import annotations

import errno
import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import _http, close_session

from hub_fixtures import use
from hub_server import COMMIT, Hub
from shoal.hub import failures
from shoal.hub.fetch import Order, fetch, order
from shoal.hub.names import parse
from shoal.hub.places import here

TINY = "org/tiny-GGUF:Q4_K_M"
FILE = "Tiny-Q4_K_M.gguf"


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited for between tries, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr(failures, "sleep", waited.append)
    for module in (_http, file_download):
        monkeypatch.setattr(module.time, "sleep", waited.append)
    return waited


def asked(name: str) -> Order:
    wanted = parse(name)
    assert wanted is not None
    return order(wanted)


def pulled(name: str) -> Path:
    return fetch(asked(name))


def refused(name: str) -> str:
    with pytest.raises(ValueError) as error:
        pulled(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def blobs() -> list[str]:
    """Names of what the cache holds of bytes."""
    return sorted(path.name for path in Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*"))


def test_a_file_and_what_predicts_beside_it(at_hub: Hub) -> None:
    said: list[str] = []
    found = asked(TINY)
    assert (found.commit, found.chosen.sees, found.chosen.left) == (COMMIT, "mmproj-F16.gguf", "")
    assert found.nbytes == found.missing == 180_000 + 700 + 700
    place = fetch(found, said.append)
    assert place.read_bytes() == at_hub.repositories["org/tiny-GGUF"][FILE]
    assert sorted(path.name for path in place.parent.iterdir()) == [FILE, "mmproj-F16.gguf", "mtp-Tiny-Q8_0.gguf"]
    assert said == [f"fetching {FILE}, 180.0 kB", "fetching mtp-Tiny-Q8_0.gguf, 700 bytes",
                    "fetching mmproj-F16.gguf, 700 bytes"]
    assert asked(TINY).missing == 0


def test_other_tools_find_it_in_the_cache(at_hub: Hub) -> None:
    place = pulled(TINY)
    assert try_to_load_from_cache("org/tiny-GGUF", FILE) == str(place)
    before = len(at_hub.gets())
    assert hf_hub_download("org/tiny-GGUF", FILE) == str(place) and len(at_hub.gets()) == before


def test_what_is_here_is_not_fetched_again(at_hub: Hub) -> None:
    pulled(TINY)
    before, said = len(at_hub.gets()), []
    assert fetch(asked(TINY), said.append).name == FILE
    assert len(at_hub.gets()) == before and not said


def test_parts_and_folders(at_hub: Hub) -> None:
    first = pulled("org/big-GGUF")
    assert first.name == "Big-Q8_0-00001-of-00003.gguf" and len(list(first.parent.iterdir())) == 3
    folder = pulled("org/tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_no_token_goes_to_the_storage(at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    at_hub.private.add("org/tiny-GGUF")
    pulled(TINY)
    assert all(token is not path.startswith("/storage/") for _, path, _, token in at_hub.heard)


def test_an_answer_that_breaks_off_is_asked_for_from_there(at_hub: Hub) -> None:
    at_hub.cut, at_hub.cuts = 50_000, 3
    pulled(TINY)
    starts = [int(asked.split("=")[1].split("-")[0]) if asked else 0 for asked in at_hub.gets(FILE)]
    assert starts[0] == 0 and len(starts) == 4 and starts == sorted(set(starts))


@pytest.mark.parametrize("brought", [70_000, 0])
@pytest.mark.quick(2)
def test_whoever_gives_up_it_is_asked_for_again(brought: int, at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As older versions of `huggingface_hub` do at once; not where nothing came."""
    real, tried = file_download.http_get, []

    def gives_up(url: str, out: Any, **options: Any) -> None:
        tried.append(options["resume_size"])
        if len(tried) > 1:
            return real(url, out, **options)
        out.write(at_hub.repositories["org/tiny-GGUF"][FILE][:brought])
        raise HTTPError("cut")

    monkeypatch.setattr(file_download, "http_get", gives_up)
    if brought:
        assert pulled(TINY).name == FILE and at_hub.gets(FILE) == ["bytes=70000-"]
    else:
        assert "cannot be reached (cut)" in refused(TINY) and tried == [0] and blobs() == []


def test_what_an_interruption_left_is_gone_on_from(at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(TINY)
    real = file_download.http_get

    def interrupted(url: str, out: Any, **options: Any) -> None:
        out.write(at_hub.repositories["org/tiny-GGUF"][FILE][:70_000])
        raise KeyboardInterrupt

    monkeypatch.setattr(file_download, "http_get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(found)
    monkeypatch.setattr(file_download, "http_get", real)
    said: list[str] = []
    again = asked(TINY)
    assert again.missing == again.nbytes - 70_000
    assert fetch(again, said.append).read_bytes() == at_hub.repositories["org/tiny-GGUF"][FILE]
    assert said[0] == f"fetching {FILE}, 180.0 kB, of which 70.0 kB are here" and at_hub.gets(FILE) == ["bytes=70000-"]


def test_what_another_process_has_fetched_meanwhile(at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(TINY)
    blob = Path(constants.HF_HUB_CACHE) / "models--org--tiny-GGUF" / "blobs" / found.files[0].sha256

    @contextmanager
    def waited(_: Path) -> Iterator[None]:
        if not blob.exists():
            blob.write_bytes(at_hub.repositories["org/tiny-GGUF"][FILE])
        yield

    monkeypatch.setattr("huggingface_hub.utils.WeakFileLock", waited)
    assert fetch(found).name == FILE
    assert at_hub.gets(FILE) == [] and not [name for name in blobs() if name.endswith(".part")]


def test_a_storage_without_ranges(at_hub: Hub) -> None:
    """What is here is read anew where the server gives the whole file."""
    found = asked(TINY)
    at_hub.ranges = False
    folder = Path(constants.HF_HUB_CACHE) / "models--org--tiny-GGUF" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{found.files[0].sha256}.part").write_bytes(b"other bytes")
    assert fetch(found).read_bytes() == at_hub.repositories["org/tiny-GGUF"][FILE]


@pytest.mark.quick(2)
@pytest.mark.parametrize("longer", [False, True])
def test_what_is_left_of_another_file_is_found_out(longer: bool, at_hub: Hub) -> None:
    found = asked(TINY)
    folder = Path(constants.HF_HUB_CACHE) / "models--org--tiny-GGUF" / "blobs"
    folder.mkdir(parents=True)
    part = folder / f"{found.files[0].sha256}.part"
    part.write_bytes(b"other" * (50_000 if longer else 100))
    if longer:  # it can be no beginning of the file
        assert fetch(found).read_bytes() == at_hub.repositories["org/tiny-GGUF"][FILE]
        return
    with pytest.raises(ValueError, match="its bytes were changed or damaged on the way. It is removed; pull again"):
        fetch(found)
    assert not part.exists() and fetch(found).name == FILE


def test_a_wrong_hash_keeps_nothing(at_hub: Hub) -> None:
    at_hub.wrong.add(FILE)
    said = refused(TINY)
    assert re.match(rf"{FILE} has the hash [0-9a-f]{{64}}, and the Hub states [0-9a-f]{{64}}: its bytes", said)
    assert blobs() == [] and here(parse(TINY)) is None
    at_hub.wrong.clear()
    assert pulled(TINY).name == FILE


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damage_in_the_cache_is_found_out(name: str, at_hub: Hub) -> None:
    """By the SHA-256 of large files and the git id of others, where another tool or a disk has spoilt them."""
    place = pulled("org/tiny") / name
    data = place.read_bytes()
    place.resolve().write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert f"{name} has the hash " in refused("org/tiny") and not place.exists()
    assert (pulled("org/tiny") / name).read_bytes() == data


def test_no_room_is_said_before(at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 150_000))
    said = refused(TINY)
    assert said.startswith(f"{TINY} takes 181.4 kB more, and 150.0 kB are free on the disk of ") and "HF_HOME" in said
    assert at_hub.gets() == [] and blobs() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_keeps_nothing(number: int, at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(url: str, out: Any, **options: Any) -> None:
        out.write(b"x" * 1000)
        raise OSError(number, "no room")

    monkeypatch.setattr(file_download, "http_get", full)
    said = f"the disk is full: {FILE} could not be written, and what there was of it is removed. Free some room"
    assert refused(TINY).startswith(said)
    assert blobs() == []


def test_asked_too_often_waits_and_asks_again(at_hub: Hub, waits: list[float]) -> None:
    at_hub.busy.update({"/api/models/": 2, "/org/": 2, "/storage/": 2})
    assert pulled(TINY).name == FILE
    assert len(waits) >= 6


def test_asked_too_often_for_good(at_hub: Hub) -> None:
    at_hub.busy["/api/models/"] = 100
    assert "asked too often (429), and said so 4 times. Wait some minutes" in refused(TINY)
    assert len(at_hub.heard) == 4


@pytest.mark.quick(12)
@pytest.mark.parametrize(("name", "message"), [
    ("org/tini-GGUF:Q4_K_M", "has no model 'org/tini-GGUF' that you may see.*If it is private: `hf auth login`"),
    ("other/tiny-GGUF", "Did you mean org/tiny-GGUF[?]"),
    ("org/tiny-GGUF:Q5_K_M", "org/tiny-GGUF has no 'Q5_K_M'. Did you mean Q4_K_M[?] It has Q4_K_M, Q8_0$"),
    ("org/tiny-GGUF:tiny-q4_k_s.gguf", "Did you mean Tiny-Q4_K_M.gguf[?]"),
    ("qwen4:4b", "Did you mean 'qwen3:4b'"),
])
def test_what_is_not_there(name: str, message: str, at_hub: Hub) -> None:
    if name.startswith("qwen"):
        with pytest.raises(ValueError, match=message):
            parse(name)
    else:
        assert re.search(message, refused(name))


@pytest.mark.quick(2)
@pytest.mark.parametrize("token", [False, True])
def test_private_and_gated(token: bool, at_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token the Hub says 401 of both; with one it says that a private one is there."""
    if token:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
    at_hub.private.add("org/tiny")
    if token:
        assert pulled("org/tiny").is_dir()
    else:
        assert "has no model 'org/tiny' that you may see" in refused("org/tiny")
    at_hub.gated.add("org/tiny-GGUF")
    page = re.escape(f"{at_hub.address}/org/tiny-GGUF")
    before = blobs()
    assert re.match(f"org/tiny-GGUF is gated: accept its terms at {page} in a browser, then", refused(TINY))
    assert here(parse(TINY)) is None and blobs() == before


def test_an_unknown_revision(at_hub: Hub) -> None:
    with pytest.raises(ValueError, match="org/tiny-GGUF has no branch, tag or commit of that name"):
        order(parse(TINY), "v9")


def test_without_a_network(at_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(TINY)
    use("http://127.0.0.1:9", tmp_path / "hub", monkeypatch)
    by_hand = f"By hand: fetch http://127.0.0.1:9/org/tiny-GGUF/resolve/main/{FILE} on a machine that can"
    with pytest.raises(ValueError, match=re.escape(by_hand)) as error:
        fetch(found)
    assert "\n" not in str(error.value)
    assert "By hand: fetch the files at http://127.0.0.1:9/org/tiny on" in refused("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    assert "cannot be reached" in refused(TINY)
