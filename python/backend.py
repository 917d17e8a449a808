"""Builds the wheel (PEP 517): the package, and libvtl.so made by scripts/libvtl.sh.

    pip wheel ./python          or, without pip:          python3 python/backend.py DIRECTORY
"""

import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
SUMMARY = "Ask for transport services, not for a protocol"


def version() -> str:
    manifest = (REPOSITORY / "Cargo.toml").read_text()
    section = manifest.split("[workspace.package]", 1)[1]
    found = re.search(r'^version = "(.*)"$', section, re.MULTILINE)
    if not found:
        raise SystemExit("Cargo.toml names no version")
    return found[1]


def tag(library: Path) -> str:
    """Any Python 3 on this processor, with the newest libc that the library asks for (PEP 600)."""
    listing = subprocess.run(
        ["objdump", "-T", library], check=True, capture_output=True, text=True
    ).stdout
    asked = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", listing)}
    major, minor = max(asked)[:2]
    return f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"


def metadata() -> str:
    return (
        "Metadata-Version: 2.1\n"
        "Name: vtl\n"
        f"Version: {version()}\n"
        f"Summary: {SUMMARY}\n"
        "License: Apache-2.0 OR MIT\n"
        "Requires-Python: >=3.9\n"
    )


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([REPOSITORY / "scripts/libvtl.sh", scratch], check=True)
        library = Path(scratch, "libvtl.so").resolve()
        platform_tag = tag(library)
        name = f"vtl-{version()}"
        info = f"{name}.dist-info"
        files = {f"vtl/{path.name}": path.read_bytes() for path in sources()}
        files["vtl/libvtl.so"] = library.read_bytes()
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\n"
        "Generator: vtl\n"
        "Root-Is-Purelib: false\n"
        f"Tag: {platform_tag}\n"
    ).encode()
    for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
        files[f"{info}/licenses/{licence}"] = (REPOSITORY / licence).read_bytes()

    record = f"{info}/RECORD"
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    files[record] = "".join([*lines, f"{record},,\n"]).encode()

    wheel = f"{name}-{platform_tag}.whl"
    os.makedirs(wheel_directory, exist_ok=True)
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            # The same bytes whenever it is built.
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


def sources():
    package = HERE / "vtl"
    return sorted([*package.glob("*.py"), package / "py.typed"])


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("vtl is built from its repository: there is no source distribution")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} DIRECTORY")
    print(Path(sys.argv[1], build_wheel(sys.argv[1])))
