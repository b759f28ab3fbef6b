"""Servers that are Java programs: their jars from Maven Central, downloaded once into the cache folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.servers.installed import cache_folder
from tests.support.servers.processes import ServerMissing


def libraries(name: str, version: str, dependencies: Mapping[str, str]) -> Path:
    """The folder of a server's jars, downloaded by the first who needs it.

    `dependencies` maps `group:artifact` to its version.
    """
    folder = cache_folder() / f"{name}-{version}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
        try:
            (unfinished / "pom.xml").write_text(_pom(name, dependencies))
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            command.append("-DoutputDirectory=libs")
            done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=unfinished)
            if done.returncode:
                raise ServerMissing(f"Maven could not download {name} {version}: {done.stdout[-1000:]}")
            with contextlib.suppress(OSError):  # another process was faster
                (unfinished / "libs").rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _pom(name: str, dependencies: Mapping[str, str]) -> str:
    listed = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        "</dependency>"
        for (group, _, artifact), version in ((key.partition(":"), version) for key, version in dependencies.items())
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        f"<groupId>idemconsumer</groupId><artifactId>test-{name}</artifactId><version>1</version>"
        f"<dependencies>{listed}</dependencies></project>"
    )
