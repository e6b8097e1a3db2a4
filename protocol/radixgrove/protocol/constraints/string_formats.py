"""Values of `format` that llguidance does not know, or takes loosely, as regular expressions."""

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
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURS = "0[48]|[2468][048]|[13579][26]"  # numbers of two digits that four divides
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}(?:{_FOURS})|(?:{_FOURS})00)-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_MINUTE})"

# llguidance takes the 29th of February in every year, and a 60th second in every minute. Dates of
# most languages have neither a year 0 nor leap seconds; they are left out here too.
PRECISE = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}

# Names that older drafts had for others.
OLDER = {"host-name": "hostname", "ip-address": "ipv4"}
# Of OpenAPI and pydantic; they hold for every text.
ANY_TEXT = frozenset({"password", "binary", "path", "file-path", "directory-path"})
