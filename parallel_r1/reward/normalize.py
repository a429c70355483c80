"""One spelling for each notation: unicode, spacing, LaTeX synonyms and mark-up of an answer, before anything reads it.

Text in, text out, linear in its length. What comes out is LaTeX with `\\frac`, `\\sqrt`, `\\text{...}`, `\\le`, ... in
one form each, `%` for percent, `°` for degrees, `\\$` for a dollar of money, and no math delimiters.
"""

from __future__ import annotations

import re
import unicodedata

_UNICODE = {
    **dict.fromkeys("−–—‒―﹣－‐‑⁃", "-"),
    **dict.fromkeys("×✕✖⨯", r" \times "),
    **dict.fromkeys("·⋅∙•", r" \cdot "),
    **dict.fromkeys("º˚", "°"),
    **dict.fromkeys("′’‘`´", "'"),
    **dict.fromkeys("“”″", '"'),
    **dict.fromkeys("∪⋃", r" \cup "),
    **dict.fromkeys("≤⩽≦", r" \le "),
    **dict.fromkeys("≥⩾≧", r" \ge "),
    **dict.fromkeys("∅⌀Ø", r" \emptyset "),
    **dict.fromkeys("⟨〈", r" \langle "),
    **dict.fromkeys("⟩〉", r" \rangle "),
    "÷": "/", "⁄": "/", "∕": "/", "∞": r" \infty ", "≠": r" \ne ", "≈": r" \approx ", "∈": r" \in ", "±": r" \pm ",
    "∓": r" \mp ", "∩": r" \cap ", "∖": r" \setminus ", "ℝ": r" \reals ", "ℤ": r" \mathbb{Z} ", "π": r" \pi ",
    "θ": r" \theta ", "α": r" \alpha ", "β": r" \beta ", "λ": r" \lambda ", "φ": r" \phi ", "ϕ": r" \phi ",
    "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∠": r" \angle ", "△": r" \triangle ", "→": r" \to ", "…": r" \ldots ", "∶": ":",
    "‰": "/1000", "，": ",", "；": ";", "、": ",", "∨": " or ", "∧": " and ", "¢": r"\text{ cents}",
}  # fmt: skip
_TRANSLATE = str.maketrans(_UNICODE)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_SYNONYMS = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"], "frac"),
    **dict.fromkeys(["leq", "leqslant"], "le"),
    **dict.fromkeys(["geq", "geqslant"], "ge"),
    **dict.fromkeys(["dbinom", "tbinom"], "binom"),
    **dict.fromkeys(["ast", "cdotp", "bullet"], "cdot"),
    **dict.fromkeys(["dots", "cdots"], "ldots"),
    **dict.fromkeys(["degree", "degrees"], "°"),
    **dict.fromkeys(["doteq", "simeq"], "approx"),
    **dict.fromkeys(["R", "Reals"], "reals"),
    **dict.fromkeys(["lor", "vee"], "or"),
    **dict.fromkeys(["land", "wedge"], "and"),
    "neq": "ne", "infin": "infty", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]",
    "bigcup": "cup", "backslash": "setminus", "imath": "i", "euro": "€", "pounds": "£", "colon": ":",
}  # fmt: skip
_BARE = {
    "°": "°",
    "[": "[",
    "]": "]",
    "i": "i",
    "or": r"\text{ or }",
    "and": r"\text{ and }",
    "€": "€",
    "£": "£",
    ":": ":",
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SPACE = re.compile(
    r"\\(?:quad|qquad|thinspace|enspace|medspace|thickspace|hfill|space|nobreakspace|newline|par|phantom\s*-)(?![a-zA-Z])"
    r"|\\(?:[hv]space|hskip|phantom|hphantom|vphantom)\*?\{[^{}]*\}"
    r"|(?<!\\)\\[,;:> ]|~|&nbsp;|[\s\u00a0\u2000-\u200a\u202f\u205f]+"
)
_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|boldmath|middle|tag\*?\{[^{}]*\}"
    r"|label\{[^{}]*\}|color\{[^{}]*\}|(?:sf|bf|rm|it|tt)(?=[\s{}]))(?![a-zA-Z])\.?|(?<!\\)\\[()\[\]!]|\\end\{(?:aligned|align|equation|gathered)\*?\}"
    r"|\\begin\{(?:aligned|align|equation|gathered)\*?\}"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|sc)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|textnormal|emph"
    r"|operatorname\*?|underline|fbox|boxed|ensuremath|textcolor\{[^{}]*\}|mathop|bold|bf|rm)\s*\{([^{}]*)\}"
)
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb|mathbf|bf)\s*\{?\s*R\s*\}?(?![a-zA-Z])")
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp",
    "gcd", "lcm", "max", "min", "sgn", "det",
}  # fmt: skip
_DEGREES = re.compile(
    r"\^\s*\{?\s*(?:\\circ(?![a-zA-Z])|\\text\{\s*o\s*\}|°|\\text\{\s*°\s*\})\s*\}?|\\circ(?![a-zA-Z])"
)
_PERCENT = re.compile(
    r"\\%|\\text\{\s*(?:%|percent(?:age)?|per cent|pct\.?)\s*\.?\s*\}"
    r"|(?<![a-zA-Z\\])(?:percent|per cent|pct)(?![a-zA-Z])",
    re.IGNORECASE,
)
_ONE_ARGUMENT = re.compile(r"\\sqrt\s*(?=[0-9a-zA-Z\\])(\d|[a-zA-Z]|\\[a-zA-Z]+)")
_FRACTION_ARGUMENTS = re.compile(
    r"\\frac\s*(?:\{([^{}]*)\}|(\d)|([a-zA-Z])|(\\[a-zA-Z]+))\s*(?:(\d)|([a-zA-Z])|(\\[a-zA-Z]+)|\{([^{}]*)\})"
)
_MINUS_WORD = re.compile(r"(?:(?<![a-zA-Z\\{])(?:negative|minus)|\\text\{\s*(?:negative|minus)\s*\})\s*(?=[\d.\\])")
_CHOOSE = re.compile(r"\{([^{}]+)\\choose(?![a-zA-Z])([^{}]+)\}")
_PLAIN_NAME = re.compile(
    r"(?<![a-zA-Z\\{])(sqrt|pi|sin|cos|tan|cot|csc|ln|log|exp|theta|alpha|beta|arcsin|arccos|arctan)(?![a-zA-Z}])"
)
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_OVER = re.compile(r"\{([^{}]+)\\over(?![a-zA-Z])([^{}]+)\}")
_POWER = re.compile(r"(?<=[\w)}])\s?\*\*\s?(?=[\w({\\-])")
_GROUPED_COMMA = re.compile(r"(?<=\d)\{ ?[,'] ?\}(?=\d{3}(?!\d))")
_GROUPED_MARK = re.compile(r"(?<=\d)\{([.,:])\}(?=\d)")
_INFINITY = re.compile(r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", re.IGNORECASE)


def clean(text: str) -> str:
    """The answer in its one spelling. Nothing is evaluated, and what is not understood stays as it is."""
    text = _from_unicode(text)
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)  # commands that were escaped twice
    text = _math_delimiters(re.sub(r"\\\\\[[^\[\]]{0,12}\]", r"\\\\", text))
    text = _SPACE.sub(" ", text)
    text = _DROPPED.sub("", text)
    text = _commands(text)
    text = re.sub(r"(\.\d+)\.{3,}", r"\1\\ldots ", text)
    text = _GROUPED_COMMA.sub("", text)
    text = _GROUPED_MARK.sub(lambda m: "." if m[1] == "," and m.start() else m[1], text)
    text = re.sub(r"(?<![a-zA-Z])\{([-+])\}", r"\1", text)
    text = _POWER.sub("^", text).replace("**", "").replace("__", "")
    text = _DEGREES.sub("°", text)
    text = _texts(_BLACKBOARD.sub(r"\\reals ", text))
    text = _PERCENT.sub("%", text)
    text = _MINUS_WORD.sub("-", text)
    text = _INFINITY.sub(r"\\infty ", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _OVER.sub(r"\\frac{\1}{\2}", text))
    text = _braced_roots(_PLAIN_NAME.sub(r"\\\1", text))
    text = _ONE_ARGUMENT.sub(r"\\sqrt{\1}", text)
    text = _FRACTION_ARGUMENTS.sub(_braced_fraction, text)
    text = re.sub(r"(?<![<>=!:])(?:<=|=<)(?!=)|&lt;=", r"\\le ", text)
    text = re.sub(r">=(?!=)|&gt;=", r"\\ge ", text).replace("&lt;", "<").replace("&gt;", ">")
    text = re.sub(r"(?<![\d)}])!=", r"\\ne ", text)  # but 5!=120 is a factorial
    text = re.sub(r"\\lt(?![a-zA-Z])", "<", text)
    text = re.sub(r"\\gt(?![a-zA-Z])", ">", text)
    return trim(re.sub(r" +", " ", text))


def trim(text: str) -> str:
    """Without the mark-up, brackets that hold nothing back and punctuation that stand around an answer."""
    before = None
    while before != text:
        before = text
        text = text.strip(" \t\n\"'*`#~")
        text = re.sub(r"(?<!\\)(?:[.,;:]|\\\\)+$", "", text)
        text = re.sub(r"^[,;:=]+(?=.)", "", text)
        if text[:1] == "{" and matching(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def matching(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, escaped braces aside; -1 when nothing does."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _from_unicode(text: str) -> str:
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
        text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
        text = text.translate(_TRANSLATE)
        text = "".join(_plain_character(c) for c in text)
    return "".join(c for c in text if c >= " " or c in "\n\t")


def _plain_character(c: str) -> str:
    if c < "\x7f":
        return c
    if unicodedata.category(c) == "No" and "/" in (fraction := unicodedata.normalize("NFKC", c).replace("⁄", "/")):
        top, bottom = fraction.split("/", 1)
        return rf"\frac{{{top}}}{{{bottom}}}"
    if unicodedata.category(c) in ("Cf", "Cc", "Cs", "Co", "Cn"):
        return ""
    if unicodedata.category(c) == "Nd":
        return str(unicodedata.digit(c))
    if "\uff01" <= c <= "\uff5e" or "\U0001d400" <= c <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", c)
    return c


def _math_delimiters(text: str) -> str:
    """Dollars of money become `\\$`, dollars of mathematics go."""
    if "$" not in text:
        return text
    text = text.replace(r"\$", "\0")
    text = text.replace("$$", "$")
    if text.count("$") % 2:  # an unpaired one is money, if it stands before a number
        text = re.sub(r"\$(?=\s?[\d.]*\d)", "\0", text, count=1)
    return text.replace("$", " ").replace("\0", r"\$")


def _commands(text: str) -> str:
    def one(match: re.Match) -> str:
        name = _SYNONYMS.get(match[1], match[1])
        return _BARE.get(name, "\\" + name)

    text = _COMMAND.sub(one, text)
    return text.replace(r"\{ }", " ").replace("{ }", " ").replace("{}", "")


def _texts(text: str) -> str:
    """Every text-like command becomes `\\text{...}`; single letters (a roman e, i, d) and functions become bare."""

    def one(match: re.Match) -> str:
        inner = match[1]
        word = inner.strip()
        if word in _FUNCTIONS:
            return "\\" + word + " "
        if word in ("i", "e") or (len(word) == 1 and not match[0].startswith((r"\text", r"\mbox"))):
            return word
        if word in (".", ",", ";", ":"):
            return ""
        if word.lower() == "infinity" or word in ("-", "+"):
            return {"-": "-", "+": "+"}.get(word, r"\infty ")
        if re.fullmatch(r"[\d.,/+\-() ]*\d[\d.,/+\-() ]*", inner) or any(c in inner for c in "\\^_="):
            return "{" + inner + "}" if match[0].startswith(r"\boxed") else f" {inner} "
        return r"\text{" + inner + "}"

    for _ in range(3):  # a text inside a text inside a box; deeper ones stay as they are
        new = _TEXT.sub(one, text)
        if new == text:
            break
        text = new
    return text


def _braced_roots(text: str) -> str:
    r"""`\sqrt(2+x)`, as calculators write it, with braces."""
    return _ROOT.sub(r"\\sqrt{\1}", text) if r"\sqrt" in text else text


def _braced_fraction(match: re.Match) -> str:
    top, bottom = (part for part in match.groups() if part is not None)
    return rf"\frac{{{top}}}{{{bottom}}}"
