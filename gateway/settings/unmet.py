"""What a configuration names and this machine lacks: variables, files, folders, certificates."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gateway.settings.files import file_fault
from gateway.settings.named import Named, at_home
from gateway.settings.problems import Finding
from gateway.settings.secrets import SecretMissing, SecretRef, carried, read_headers, read_signing_keys
from gateway.settings.tls import store_faults, tls_fault
from gateway.settings.yaml_tree import Path as TreePath


def findings(named: Named, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is missing or unusable, at the places where it is named."""
    yield from _in_secrets(named, environ)
    yield from _in_files(named)
    yield from _in_folders(named)


def _in_secrets(named: Named, environ: Mapping[str, str]) -> Iterator[Finding]:
    for path, secret in _secrets(named):
        try:
            found = secret.read(environ)
        except SecretMissing as error:
            yield Finding(path, str(error))
        else:
            # A caller's key is only compared; but one with a line break, say, is in no request.
            if not (found.isprintable() if path[0] == "keys" else carried(found)):
                where = secret.file or "it"
                yield Finding(path, f"{where} has a character that no header can carry")
    for name, section in named.document.webhooks.items():
        try:
            read_signing_keys(named.webhook_secret(name), environ)
        except (SecretMissing, ValueError) as error:
            kind = "secret_file" if section.secret_env is None else "secret_env"
            yield Finding(("webhooks", name, kind), str(error))
    try:
        read_headers(named.otlp_headers, environ)
    except (SecretMissing, ValueError) as error:
        yield Finding(("telemetry", "otlp", "headers_env"), str(error))


def _in_files(named: Named) -> Iterator[Finding]:
    for path, file in _files(named):
        if fault := file_fault(file):
            is_to_make = path[0] == "tokenizer" and not os.path.exists(file)
            yield Finding(path, f"{fault}: `gemma-gateway vocab build` makes it" if is_to_make else fault)
    for name in named.document.backends:
        tls = named.tls(name)
        own = replace(tls, ca_file=None)
        for key, one in (("ca_file", replace(tls, cert_file=None, key_file=None)), ("cert_file", own)):
            if fault := tls_fault(one):
                yield Finding(("backends", name, "tls", key), fault)
    if named.document.store is not None:
        for fault in store_faults(named.document.store.url):
            yield Finding(("store", "url"), fault)


def _in_folders(named: Named) -> Iterator[Finding]:
    jobs = named.document.jobs
    if named.jobs_folder is not None and jobs is not None:
        place = "jobs", "data_dir"
        if _is_homeless(jobs.data_dir):
            yield Finding(place, f"there is no home directory {Path(jobs.data_dir).parts[0]}")
        elif os.path.exists(named.jobs_folder) and not os.path.isdir(named.jobs_folder):
            yield Finding(place, f"{named.jobs_folder} is not a folder")
    if named.decisions_file is not None:
        place = "decisions", "file"
        if not os.path.isdir(named.decisions_file.parent):
            yield Finding(place, f"there is no folder {named.decisions_file.parent}")
        elif os.path.isdir(named.decisions_file):
            yield Finding(place, f"{named.decisions_file} is a folder")


def _secrets(named: Named) -> Iterator[tuple[TreePath, SecretRef]]:
    """Yield the secrets that are sent or compared as they are."""
    document = named.document
    for name, backend in document.backends.items():
        if (secret := named.backend_key(name)) is not None:
            kind = "api_key_file" if backend.api_key_env is None else "api_key_env"
            yield ("backends", name, kind), secret
    for name, box in document.boxes.items():
        for member in box.backends:
            if (secret := named.box_token(name, member)) is not None:
                yield ("boxes", name, "backends", member, "http", "token_env"), secret
    for name, key in (document.keys or {}).items():
        if (secret := named.key(name)) is not None:
            yield ("keys", name, "file" if key.env is None else "env"), secret


def _files(named: Named) -> Iterator[tuple[TreePath, Path]]:
    if named.vocab is not None:
        yield ("tokenizer", "vocab"), named.vocab
    for name in named.document.backends:
        tls = named.tls(name)
        files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
        for key, file in files.items():
            if file is not None:
                yield ("backends", name, "tls", key), file


def _is_homeless(written: str) -> bool:
    return written.startswith("~") and at_home(Path(written)) == Path(written)
