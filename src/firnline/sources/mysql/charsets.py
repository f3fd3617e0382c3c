"""Character sets of MySQL and MariaDB: their collations' numbers, and how their bytes become text.

The tables are the servers' own: a test compares every byte of every set, and every pair of bytes, with a server. What a
set leaves undefined is `?`, as the server prints it.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import codecs
from functools import cache

BINARY = 63
_IDS = {
    "big5": "1 84", "latin2": "2 9 21 27 77", "dec8": "3 69", "cp850": "4 80", "latin1": "5 8 15 31 47-49 94",
    "hp8": "6 72", "koi8r": "7 74", "swe7": "10 82", "ascii": "11 65", "ujis": "12 91", "sjis": "13 88",
    "cp1251": "14 23 50-52", "hebrew": "16 71", "tis620": "18 89", "euckr": "19 85", "latin7": "20 41-42 79",
    "koi8u": "22 75", "gb2312": "24 86", "greek": "25 70", "cp1250": "26 34 44 66 99", "gbk": "28 87",
    "cp1257": "29 58-59", "latin5": "30 78", "armscii8": "32 64",
    "utf8mb3": "33 76 83 192-223 576-607 2048-2303", "ucs2": "35 90 128-159 640-671 2560-2815",
    "cp866": "36 68", "keybcs2": "37 73", "macce": "38 43", "macroman": "39 53", "cp852": "40 81",
    "utf8mb4": "45-46 224-247 255-511 608-639 2304-2559", "utf16": "54-55 101-127 672-703 2816-3071",
    "utf16le": "56 62", "cp1256": "57 67", "utf32": "60-61 160-191 736-767 3072-3327", "geostd8": "92-93",
    "cp932": "95-96", "eucjpms": "97-98", "gb18030": "248-250",
}  # fmt: skip
_WIDTHS = {
    "utf8mb4": 4, "utf16": 4, "utf16le": 4, "utf32": 4, "gb18030": 4, "utf8mb3": 3, "ujis": 3, "eucjpms": 3,
    "big5": 2, "sjis": 2, "euckr": 2, "gb2312": 2, "gbk": 2, "ucs2": 2, "cp932": 2,
}  # fmt: skip
UTF8 = frozenset({"utf8mb4", "utf8mb3"})  # their bytes are UTF-8 already
_PYTHON = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "ucs2": "utf-16-be", "utf16": "utf-16-be", "utf16le": "utf-16-le",
    "utf32": "utf-32-be", "gbk": "gbk", "gb2312": "gb2312", "cp932": "cp932", "euckr": "cp949",
}  # fmt: skip
_SINGLE = {  # Python's codec and where the servers differ from it
    "latin1": ("cp1252", {0x81: "\x81", 0x8D: "\x8d", 0x8F: "\x8f", 0x90: "\x90", 0x9D: "\x9d"}),
    "latin2": ("iso8859_2", {}), "latin5": ("iso8859_9", {}), "latin7": ("iso8859_13", {}), "ascii": ("ascii", {}),
    "cp850": ("cp850", {}), "cp852": ("cp852", {}), "cp866": ("cp866", {0xFC: "ⁿ", 0xFD: "²"}),
    "cp1250": ("cp1250", {}), "cp1251": ("cp1251", {}),
    "cp1256": ("cp1256", dict.fromkeys((0x8A, 0x8F, 0x98, 0x9A, 0x9F, 0xAA, 0xC0, 0xFF), "?")),
    "cp1257": ("cp1257", {}), "hp8": ("hp_roman8", {0xFF: "?"}), "koi8r": ("koi8_r", {}),
    "koi8u": ("koi8_u", {0x95: "•"}), "hebrew": ("iso8859_8", {0xAF: "‾"}),
    "tis620": ("tis_620", dict.fromkeys((0xA0, 0xDB, 0xDC, 0xDD, 0xDE, 0xFC, 0xFD, 0xFE, 0xFF), "\ufffd")),
    "greek": ("iso8859_7", {0xA1: "ʽ", 0xA2: "ʼ", 0xA4: "?", 0xA5: "?", 0xAA: "?"}), "macce": ("mac_latin2", {}),
    "macroman": ("mac_roman", {}),
    "swe7": ("ascii", {0x40: "É", 0x5B: "Ä", 0x5C: "Ö", 0x5D: "Å", 0x5E: "Ü", 0x60: "é", 0x7B: "ä", 0x7C: "ö",
                       0x7D: "å", 0x7E: "ü", 0x7F: "?"}),
}  # fmt: skip
_UPPER_HALVES = {  # sets that Python does not have
    "dec8": (
        "\x80\x81\x82\x83\x84\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95\x96\x97\x98\x99"
        "\x9a\x9b\x9c\x9d\x9e\x9f\xa0¡¢£?¥?§¤©ª«????°±²³?µ¶·?¹º»¼½?¿ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏ?ÑÒÓÔÕÖŒØÙÚÛÜŸ?ßàáâãäåæçèéêëì"
        "íîï?ñòóôõöœøùúûüÿ??"
    ),
    "armscii8": (
        "\x80\x81\x82\x83\x84\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95\x96\x97\x98\x99"
        "\x9a\x9b\x9c\x9d\x9e\x9f\xa0❁§։)(»«—.՝,-՟…՜՛՞ԱաԲբԳգԴդԵեԶզԷէԸըԹթԺժԻիԼլԽխԾծԿկՀհՁձՂղՃճՄմՅյՆնՇշՈոՉչՊպՋջՌռՍսՎ"
        "վՏտՐրՑցՒւՓփՔքՕօՖֆ’'"
    ),
    "keybcs2": (
        "ČüéďäĎŤčěĚĹÍľĺÄÁÉžŽôöÓůÚýÖÜŠĽÝŘťáíóúňŇŮÔšřŕŔ¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀αßΓπΣσµτ"
        "ΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\xa0"
    ),
    "geostd8": (
        "€?‚?„…†‡?‰?‹?????‘’“”•–—???›????\xa0¡¢£¤¥¦§¨©ª«¬\xad®¯°±²³´µ¶·¸¹º»¼½¾¿აბგდევზჱთიკლმნჲოპჟრსტჳუფქღყშჩცძწჭხ"
        "ჴჯჰჵ???????????????????????№??"
    ),
}


@cache
def name_of(collation: int) -> str:
    """Return the character set of a collation's number; empty for bytes.

    Raises:
        ValueError: no server that is known here has it.
    """
    if collation == BINARY:
        return ""
    # MariaDB's collations without padding have the number of the padded one and 1024.
    number = collation - 1024 if 1024 < collation < 2048 else collation
    for name, words in _IDS.items():
        for word in words.split():
            first, _, last = word.partition("-")
            if int(first) <= number <= int(last or first):
                return name
    raise ValueError(f"collation {collation} is not known to this version of Firnline")


def width(charset: str) -> int:
    """Return how many bytes a character of the set has at most."""
    return _WIDTHS.get(charset, 1)


def decode(value: bytes, charset: str) -> str:
    """Return the text that bytes of a character set stand for."""
    if charset == "":
        return value.decode("utf-8", "backslashreplace")  # names of a binary ENUM
    if charset in _SINGLE or charset in _UPPER_HALVES:
        return codecs.charmap_decode(value, "strict", _table(charset))[0]
    if charset == "sjis":
        return value.decode("shift_jis", "replace").replace("＼", "\\")
    if charset == "ujis":
        return value.decode("euc_jp", "firnline-ujis").replace("＼", "\\")
    if charset == "eucjpms":
        return _decode_eucjpms(value)
    if charset == "big5":
        return value.decode("big5", "firnline-big5")
    if charset == "gb18030":
        return value.decode("gb18030", "replace").translate({0xE7C7: "ḿ", 0x1E3F: "\ue7c7"})
    return value.decode(_PYTHON[charset], "replace")


@cache
def _table(charset: str) -> str:
    """Return the characters of a set's 256 bytes."""
    if charset in _UPPER_HALVES:
        return bytes(range(128)).decode("ascii") + _UPPER_HALVES[charset]
    codec, changes = _SINGLE[charset]
    found = []
    for byte in range(256):
        try:
            found.append(changes.get(byte) or bytes([byte]).decode(codec))
        except UnicodeDecodeError:
            found.append("?")
    return "".join(found)


def _decode_ujis_rest(error: UnicodeError) -> tuple[str, int]:
    """Decode a character of the private area, which Python's codec lacks."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    pair = error.object[error.start : error.start + 2]
    if len(pair) == 2 and 0xF5 <= pair[0] <= 0xFE and 0xA1 <= pair[1] <= 0xFE:
        return chr(0xE000 + (pair[0] - 0xF5) * 94 + pair[1] - 0xA1), error.start + 2
    return "\ufffd", error.end


def _decode_big5_rest(error: UnicodeError) -> tuple[str, int]:
    """Decode one of the seven characters of ETEN that Python's codec lacks."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    pair = bytes(error.object[error.start : error.start + 2])
    if b"\xf9\xd6" <= pair <= b"\xf9\xdc":
        return pair.decode("cp950"), error.start + 2
    return "\ufffd", error.end


codecs.register_error("firnline-ujis", _decode_ujis_rest)
codecs.register_error("firnline-big5", _decode_big5_rest)


def _decode_eucjpms(value: bytes) -> str:
    """Decode the rows of EUC with Microsoft's table: as the same characters of cp932."""
    found, at = [], 0
    while at < len(value):
        first = value[at]
        pair = value[at : at + 2]
        if first < 0x80:
            found.append(chr(first))
            at += 1
        elif len(pair) == 2 and 0xF5 <= first <= 0xFE and 0xA1 <= pair[1] <= 0xFE:
            found.append(chr(0xE000 + (first - 0xF5) * 94 + pair[1] - 0xA1))
            at += 2
        elif len(pair) == 2 and first >= 0xA1 and pair[1] >= 0xA1:
            row, cell = first - 0xA1, pair[1] - 0xA1
            lead = (row >> 1) + (0x81 if row < 62 else 0xC1)
            trail = cell + (0x9F if row & 1 else 0x40 if cell < 63 else 0x41)
            found.append(bytes([lead, trail]).decode("cp932", "replace"))
            at += 2
        else:
            size = 3 if first == 0x8F else 2
            found.append(value[at : at + size].decode("euc_jp", "replace"))
            at += size
    return "".join(found)
