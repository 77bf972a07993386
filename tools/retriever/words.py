"""Tokenizer of the index, the same when a document is indexed and when a query is asked."""

from __future__ import annotations

import hashlib
import unicodedata

import pydantic
import tantivy

from agentrl.errors import ConfigError

LANGUAGES = (
    "arabic",
    "danish",
    "dutch",
    "english",
    "finnish",
    "french",
    "german",
    "greek",
    "hungarian",
    "italian",
    "norwegian",
    "portuguese",
    "romanian",
    "russian",
    "spanish",
    "swedish",
    "tamil",
    "turkish",
)
"""Languages whose endings can be cut (Snowball stemmers)."""

LONGEST_WORD = 128
"""Bytes of a word; what is longer is no word that anybody looks for."""

_SAMPLE = (
    "The U.S. president's naïve résumé ran: running, relational ponies, 3.14 x_y don't ﬁve Straße ÅÉÎ "
    "Éditions françaises Häuser città niños дети бегущий 東京都 한국어 हिन्दी العربية " + "long" * 40
)


class WordsSpec(pydantic.BaseModel):
    """Description of the tokenizer of an index, kept with it."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    language: str
    digest: str
    """Hash of the words of a fixed text: the libraries that make them may change, too."""


class Words:
    """Tokenizer: runs of letters and digits, compatibility forms and accents folded, lower case, endings cut by
    language."""

    def __init__(self, language: str) -> None:
        """Build the tokenizer. `language`: one of LANGUAGES, or "none" to keep words whole. Raises ConfigError."""
        if language != "none" and language not in LANGUAGES:
            raise ConfigError(f"no endings are known of {language!r}: choose none, {', '.join(LANGUAGES)}")
        self.language = language
        fold = tantivy.Filter
        chain = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(fold.remove_long(LONGEST_WORD))
        chain = chain.filter(fold.lowercase()).filter(fold.ascii_fold())
        self.analyzer = (chain if language == "none" else chain.filter(fold.stemmer(language))).build()

    @staticmethod
    def plain(text: str) -> str:
        """Normalise a text to the form that `analyzer` is given."""
        return text if text.isascii() else unicodedata.normalize("NFKC", text)

    def __call__(self, text: str) -> list[str]:
        """Split a text into words, in its order, repeated ones too."""
        return self.analyzer.analyze(self.plain(text))

    @property
    def spec(self) -> WordsSpec:
        """Description to be kept with the index."""
        return WordsSpec(language=self.language, digest=hashlib.sha256(repr(self(_SAMPLE)).encode()).hexdigest()[:16])

    @classmethod
    def from_spec(cls, spec: WordsSpec) -> Words:
        """Make the tokenizer of an index. Raises ConfigError where this version makes other words."""
        words = cls(spec.language)
        if words.spec != spec:
            raise ConfigError(
                "the index was made by another version of the tokenizer, whose words differ from this one's "
                f"({spec.digest}, here {words.spec.digest}): queries would miss documents. Index the corpus anew"
            )
        return words
