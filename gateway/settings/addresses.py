"""Field types of the configuration for addresses: listeners, servers, the store, webhooks, web pages."""

import re
from ipaddress import IPv4Address
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.settings.fields import ShortForm, one_or_many
from gateway.tcp import PORT_MAX


class Address(NamedTuple):
    """The address of a listener."""

    host: str
    port: int


_HOST_AND_PORT = "write it as host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080"


def address(written: str) -> Address:
    """Parse `host:port` or `[v6]:port`; port 0 lets the system choose one.

    Raises:
        ValueError: the syntax is invalid.
    """
    host, _, port = written.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if (
        bare in {"", "*"}  # getaddrinfo treats "*" like an empty name, which is loopback
        or not port.isascii()
        or not port.isdigit()
        or len(port.lstrip("0")) > 5
        or int(port) > PORT_MAX
        or (":" in bare and not bracketed)
    ):
        raise ValueError(_HOST_AND_PORT)
    _no_variable(bare)
    if not (_ADDRESS_V6 if bracketed else _NAME).fullmatch(bare):
        raise ValueError(f"its host is neither a name nor an address; {_HOST_AND_PORT}")
    _no_false_address(bare)
    return Address(bare, int(port))


_ADDRESS_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.~-]+)?")
_NAME = re.compile(r"[^\s!-,/:-@\[-^`{-\x7f]+")
"""A host by name or IPv4 address: of the ASCII characters, letters, digits, `-`, `.` and `_`."""


def _no_variable(host: str) -> None:
    """Raise ValueError for a host with a variable that is not replaced."""
    if "$" in host:
        raise ValueError("a variable is written as ${NAME}, with braces")


_WILDCARDS = {"0.0.0.0": 4, "::": 0}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def overlap(one: Address, other: Address) -> bool:
    """Return whether two listeners cannot have these addresses. Of names, only localhost is resolved."""
    if one.port != other.port or not one.port:
        return False
    hosts = {one.host.lower(), other.host.lower()}
    if len(hosts) == 1 or ("localhost" in hosts and hosts <= _LOOPBACK):
        return True
    return any(
        _WILDCARDS[host] in {0, _version(rest)}
        for host in hosts & _WILDCARDS.keys()
        for rest in hosts - {host}
    )


def _version(host: str) -> int:
    """Return the IP version of a host; names count as 4."""
    return 6 if ":" in host else 4


def _address_text(written: Any) -> Any:
    if isinstance(written, int) and not isinstance(written, bool):
        raise ValueError(f"write it as host:port, such as 127.0.0.1:{written}")
    if isinstance(written, str):
        address(written)
    return written


AddressText = Annotated[str, BeforeValidator(_address_text)]


def _off(written: Any) -> Any:
    return None if written is False or written == "off" else written


OptionalAddress = Annotated[
    AddressText | None,
    ShortForm(_off, {"enum": ["off", False]}),
]


_FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def _no_false_address(host: str) -> None:
    """Raise ValueError for four numbers that are no address: 10.0.0.256, or 010.0.0.1 (to some 8.0.0.1)."""
    if _FOUR_NUMBERS.fullmatch(host):
        try:
            IPv4Address(host)
        except ValueError:
            message = "its host is no IP address: four numbers from 0 to 255, without zeros before them"
            raise ValueError(message) from None


_SERVER = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.~-]+)?\])(:[0-9]*)?")


def _no_false_host(url: SplitResult) -> None:
    """Raise ValueError for a URL whose host no server can have."""
    if not _SERVER.fullmatch(url.netloc):
        raise ValueError("a host has letters (others than ASCII as xn--), digits, `-`, `.` and `_`")


def _line(written: str) -> str:
    """Return a text without line breaks at its end, which variables have that were read from a file."""
    return written.rstrip("\r\n")


_Line = Annotated[str, AfterValidator(_line)]

_UNSEEN = re.compile(r"[\x00-\x1f\x7f]|^ | $")


def _split(written: str, example: str) -> SplitResult:
    """Split a URL. Messages, here and below, never contain it, because it may hold a password."""
    if _UNSEEN.search(written):  # `urlsplit` leaves it out, what sends a request may not
        raise ValueError("there is a line break in it, a tab, or a blank at its end or beginning")
    try:
        url = urlsplit(written)
        _ = url.port
    except ValueError:
        raise ValueError(f"this is not a URL; write it as {example}") from None
    return url


_OF_THE_API = re.compile(r"/v1(/(chat/)?completions|/responses|/models)?/?$")
_BASE_PATH = re.compile(r"(/([A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})+)*/?")


def _base_url(written: str) -> str:
    """Return the URL as `_url` does, without a trailing slash."""
    url = _split(written, "http://host:port")
    host = url.hostname
    _no_variable(host or "")
    if url.scheme not in {"http", "https"} or not host or url.port == 0:
        raise ValueError("write it as http://host:port or https://host:port")
    _no_false_address(host)
    if url.username is not None or url.password is not None:
        raise ValueError("no credentials in URLs; name the key with api_key_env or api_key_file")
    _no_false_host(url)
    if _OF_THE_API.search(url.path):
        raise ValueError("leave /v1 out: the gateway appends it")
    if "?" in written or "#" in written:  # empty ones, too, take up what is appended
        raise ValueError("only scheme, host, port and path: what it asks for is appended")
    if not _BASE_PATH.fullmatch(url.path) or {".", ".."} & set(url.path.split("/")):
        raise ValueError("a path consists of letters, digits, `-`, `.`, `_`, `~` and escapes such as %20")
    return url.geturl().rstrip("/")


_HTTP = Field(json_schema_extra={"pattern": "^(https?://|.*\\$\\{)"})

BaseUrl = Annotated[_Line, AfterValidator(_base_url), _HTTP]


def _url(written: str) -> str:
    """Return the URL with its scheme in lower case."""
    url = _split(written, "http://host:port/path")
    if url.scheme not in {"http", "https"} or not url.hostname or url.fragment:
        raise ValueError("write it as http://host:port/path or https://host:port/path")
    _no_false_address(url.hostname)
    if url.username is not None or url.password is not None:
        raise ValueError("no credentials in URLs; name the variable with them (token_env, headers_env)")
    _no_false_host(url)
    return url.geturl()


Url = Annotated[_Line, AfterValidator(_url), _HTTP]


def _store_url(written: str) -> str:
    url = _split(written, f"redis://host:6379/0. {_ESCAPED}")
    if url.scheme not in {"redis", "rediss", "unix"} or not (url.hostname or url.path):
        raise ValueError("write it as redis://host:6379/0, rediss://host:6379/0 or unix:///path")
    if url.scheme == "unix":
        return written
    if not url.hostname or url.fragment or "@" in url.path + url.query:
        raise ValueError(f"write it as redis://host:6379/0. {_ESCAPED}")
    if not re.fullmatch(r"/?[0-9]*", url.path):
        raise ValueError("what follows host and port is the number of a database, as in redis://host:6379/0")
    host = unquote(url.hostname)
    _no_variable(host)
    if not (_ADDRESS_V6 if ":" in host else _NAME).fullmatch(host):
        raise ValueError("its host is neither a name nor an address; write it as redis://host:6379/0")
    _no_false_address(host)
    return written


_ESCAPED = "In a password, write % as %25, / as %2F, ? as %3F, # as %23 and @ as %40"

StoreUrl = Annotated[
    _Line,
    AfterValidator(_store_url),
    Field(json_schema_extra={"pattern": "^(rediss?://|unix:|.*\\$\\{)"}),
]


_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")

_URL_MAX = 2048
"""Maximum characters of a URL. A choice: common servers take as many."""


def _webhook_url(written: str) -> str:
    url = _split(written, "https://host/path")
    if url.scheme not in {"http", "https"} or not url.hostname or url.port == 0:
        raise ValueError("write it as https://host/path")
    _no_false_address(url.hostname)
    if url.username is not None or url.password is not None:
        raise ValueError("no credentials in URLs; a webhook is signed, and its receiver checks that")
    if not written.isascii() or not written.isprintable() or " " in written:
        raise ValueError("a URL has ASCII letters only; write others percent-encoded, hosts as xn--")
    if not _HOST.fullmatch(url.netloc) or len(written) > _URL_MAX:
        raise ValueError(f"write it as https://host/path, in at most {_URL_MAX:,} characters")
    if url.fragment:
        raise ValueError("a fragment (#...) is never sent; leave it out")
    return written


WebhookUrl = Annotated[_Line, AfterValidator(_webhook_url), _HTTP]

_ORIGIN = 'write it as https://host or https://host:port, or "*" alone for every origin'
_USUAL_PORTS = {"http": 80, "https": 443}


def _origin(written: str) -> str:
    """Validate `*` or an origin as sent by browsers; in any other form it would never match."""
    if written == "*":
        return written
    try:
        url = urlsplit(written)
        port = url.port
    except ValueError:
        raise ValueError(f"this is not an origin; {_ORIGIN}") from None
    if "*" in written:
        raise ValueError(f"there are no patterns: name each origin; {_ORIGIN}")
    if not url.netloc or "://" not in written:
        raise ValueError(f"an origin begins with its scheme; {_ORIGIN}")
    if not _HOST.fullmatch(url.netloc):
        raise ValueError(f"a host has ASCII letters only, others as xn--, and no credentials; {_ORIGIN}")
    bare = f"{url.scheme}://{url.netloc.lower()}"
    if written.lower() != bare:
        raise ValueError(f"an origin ends with its host or port, without even a slash: write {bare}")
    if url.netloc.endswith(":") or port == _USUAL_PORTS.get(url.scheme, -1):
        bare = bare.rpartition(":")[0]
        raise ValueError(f"browsers leave the usual port of a scheme out: write {bare}")
    return bare


Origin = Annotated[
    str,
    AfterValidator(_origin),
    Field(json_schema_extra={"pattern": r"^(\*$|[A-Za-z][A-Za-z0-9+.-]*://[^/]+$|.*\$\{)"}),
]

OriginNames = Annotated[tuple[Origin, ...], ShortForm(one_or_many, {"type": "string"})]
"""Origins of web pages: none, one, or a list."""
