"""Values of `format` that llguidance does not know, as regular expressions."""

from __future__ import annotations

_HEX = "[0-9A-Fa-f]"
_ESCAPED = f"%{_HEX}{{2}}"
_DELIMITERS = "!$&'()*+,;="
# Characters beyond ASCII that an IRI may have.
_BEYOND = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF" + "\U00010000-\U000efffd"


def _ipv6() -> str:
    group, octet = f"{_HEX}{{1,4}}", "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    last = rf"(?:{group}:{group}|{octet}(?:\.{octet}){{3}})"
    forms = [f"(?:{group}:){{6}}{last}", f"::(?:{group}:){{5}}{last}"]
    for before in range(5):  # groups before the last of those in front of `::`
        behind = f"(?:{group}:){{{4 - before}}}{last}"
        forms.append(f"(?:(?:{group}:){{0,{before}}}{group})?::{behind}")
    forms.append(f"(?:(?:{group}:){{0,5}}{group})?::{group}")
    forms.append(f"(?:(?:{group}:){{0,6}}{group})?::")
    return f"(?:{'|'.join(forms)})"


def _reference(beyond: str, *, relative: bool) -> str:
    """Of RFC 3986, or of 3987 with characters beyond ASCII."""
    plain = rf"A-Za-z0-9\-._~{beyond}{_DELIMITERS}"
    segment = f"(?:[{plain}:@]|{_ESCAPED})"
    future = rf"[Vv]{_HEX}+\.[{plain}:]+"
    host = rf"(?:\[(?:{_ipv6()}|{future})\]|(?:[{plain}]|{_ESCAPED})*)"
    authority = f"(?:(?:[{plain}:]|{_ESCAPED})*@)?{host}(?::[0-9]*)?"
    absolute = f"/(?:{segment}+(?:/{segment}*)*)?"
    rest = f"(?://{authority}(?:/{segment}*)*|{absolute}|{{}})?"
    rootless = f"{segment}+(?:/{segment}*)*"
    whole = rf"[A-Za-z][A-Za-z0-9+.\-]*:{rest.replace('{}', rootless)}"
    if relative:
        first = f"(?:[{plain}@]|{_ESCAPED})+(?:/{segment}*)*"  # no colon: it would end a scheme
        whole = f"(?:{whole}|{rest.replace('{}', first)})"
    return rf"^{whole}(?:\?(?:{segment}|[/?])*)?(?:#(?:{segment}|[/?])*)?$"


_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = f"(?:[A-Za-z0-9_]|{_ESCAPED})(?:\\.?(?:[A-Za-z0-9_]|{_ESCAPED}))*"
_VARIABLE += r"(?::[1-9][0-9]{0,3}|\*)?"
_LITERAL = r"""[^\x00-\x20"%<>\\^`{|}\x7F]"""

PATTERNS = {
    "uri-reference": _reference("", relative=True),
    "iri": _reference(_BEYOND, relative=False),
    "iri-reference": _reference(_BEYOND, relative=True),
    "uri-template": (
        rf"^(?:{_LITERAL}|{_ESCAPED}|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    ),
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    # OpenAPI's name for base64.
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
# Names that older drafts had for others.
OLDER = {"host-name": "hostname", "ip-address": "ipv4"}
# Of OpenAPI and pydantic; they hold for every text.
ANY_TEXT = frozenset({"password", "binary", "path", "file-path", "directory-path"})
