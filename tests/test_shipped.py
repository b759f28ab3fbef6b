"""What deploy/ has is started: the steps of the Dockerfile in a folder of their own, and in it the commands of the
image, of compose and of the chart, with real servers (O29)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_pika
import psycopg
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from uv import find_uv_bin

from idemconsumer.embedded.postgres import free_port
from idemconsumer.process.child import Exit
from idemconsumer.settings import PREFIX
from tests.support import ROOT
from tests.support.deploy import CHART, DEPLOY, TEMPLATES, instructions, parsed
from tests.support.servers.made import Server
from tests.support.waiting import PATIENCE, eventually


@dataclass
class Image:
    """What the Dockerfile makes, below `root` instead of below /."""

    root: Path
    environment: dict[str, str]
    folder: str
    entrypoint: list[str]
    command: list[str]

    def here(self, text: str) -> str:
        return re.sub(r"/(opt|src)\b", lambda found: f"{self.root}{found[0]}", text)

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.here(word) for word in words], cwd=self.folder, env={**self.environment, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> str:
        ended = self.start(words, environment)
        said, _ = ended.communicate(timeout=2 * PATIENCE)
        assert ended.returncode == 0, said
        return said


def built(root: Path) -> Image:
    """All but what needs root, and what only saves space or a download."""
    made = instructions()
    last = max(n for n, (word, _) in enumerate(made) if word == "FROM")
    image, building = Image(root, {}, str(root), [], []), dict(os.environ)
    building["PATH"] = ":".join(str(Path(each).parent) for each in (find_uv_bin(), Path(sys.executable).resolve()))
    building["PATH"] += f":{os.environ['PATH']}"
    for n, (word, rest) in enumerate(made):
        folder, environment = Path(image.folder), building if n < last else image.environment
        match word:
            case "ENV" | "ARG":
                for name, _, value in (each.partition("=") for each in shlex.split(image.here(rest))):
                    environment[name] = value.replace("$PATH", os.environ["PATH"])
                environment.pop("UV_NO_CACHE", None)
            case "WORKDIR":
                image.folder = image.here(rest)
                Path(image.folder).mkdir(parents=True, exist_ok=True)
            case "COPY" if not rest.startswith("--from"):
                *sources, target = shlex.split(image.here(rest))
                for source in sources:
                    if (ROOT / source).is_dir():
                        shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
                    else:
                        (folder / target).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(ROOT / source, folder / target)
            case "RUN" if not rest.startswith("groupadd"):
                rest = re.sub(r"^(pip install .*)", rf"uv \1 --target {root}/tools", rest)
                subprocess.run(["sh", "-ec", image.here(rest)], cwd=folder, env=building, check=True)
            case "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            case "CMD":
                image.command = json.loads(rest)
    return image


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return built(tmp_path_factory.mktemp("image"))


@pytest.fixture
async def environment(database: str, kafka: Server, rabbitmq: Server, sqs: Server) -> AsyncIterator[dict[str, str]]:
    """That of compose's services, with our servers instead of its. Afterwards what it has made at brokers is gone."""
    addresses = {"DSN": database, "KAFKA": kafka.address, "RABBITMQ": rabbitmq.address, "SQS": sqs.address}
    given = parsed(DEPLOY / "compose.yaml")["services"]["worker"]["environment"]
    yield given | {PREFIX + name: address for name, address in addresses.items()}
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await admin.delete_topics(["payments"])
    await admin.close()
    async with await aio_pika.connect(rabbitmq.address) as broker:
        await (await broker.channel()).queue_delete("payments")


def answered(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:  # not yet
        return 0, ""


def test_what_the_image_installs_runs_without_writing(image: Image) -> None:
    """Without the variable that forbids it, so that what was not compiled would be."""
    before = set(image.root.rglob("*"))
    image.environment = image.environment | {"PYTHONDONTWRITEBYTECODE": ""}
    assert "create table" in image.run([*image.entrypoint, "migrate", "sql", "--all"], {})
    assert set(image.root.rglob("*")) == before, "all was compiled"


def test_the_image_and_compose_start_and_apply_a_message(image: Image, environment: dict[str, str]) -> None:
    services = parsed(DEPLOY / "compose.yaml")["services"]
    prepare, worker = services["prepare"], services["worker"]
    source, target, _ = prepare["volumes"][0].split(":")
    shutil.copy(DEPLOY / source, image.here(target))
    for _ in range(2):  # may be run again
        image.run([*prepare["entrypoint"], *prepare["command"]], environment)
    found = json.loads(image.run([*image.entrypoint, "check", "payments:app", "--json"], environment))
    assert [each for each in found if each["level"] == "error"] == []

    assert worker["command"] == image.command
    chart = TEMPLATES["workers.yaml"]
    assert "args: [run, {{ .Values.app | quote }}, --ops-port, {{ .Values.opsPort | quote }}]" in chart
    values = parsed(CHART / "values.yaml")
    assert ["run", values["app"], "--ops-port", str(values["opsPort"])] == image.command

    port = free_port()
    launcher = image.start(
        [*image.entrypoint, *(str(port) if word == "9100" else word for word in image.command)], environment
    )
    try:
        eventually(lambda: launcher.poll() is not None or answered(port, "/readyz")[0] == 200, "it is ready")
        assert answered(port, "/livez") == (200, '{"alive":true,"problems":[]}\n')
        assert 'idemconsumer_workers{state="consuming"} 1.0' in answered(port, "/metrics")[1]
        (line,) = re.findall(r"exec worker (idemconsumer publish .*)", (DEPLOY / "compose.yaml").read_text("utf-8"))
        image.run(shlex.split(line), environment)
        with psycopg.connect(environment[f"{PREFIX}DSN"], autocommit=True) as shop:
            balance = "select balance from account where name = 'ann'"
            eventually(lambda: shop.execute(balance).fetchone() == (5,), "the payment is applied")
    finally:
        launcher.terminate()
        print(launcher.communicate(timeout=PATIENCE)[0])
    assert launcher.returncode == Exit.DONE
