"""Certificates for servers that tests start."""

import subprocess
from pathlib import Path


def self_signed(folder: Path, host: str) -> tuple[Path, Path]:
    """Return a new certificate for a host, and its key, as files in PEM format."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName=DNS:{host}"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key
