"""Fifty prompts that differ in length, language, register and formatting."""

from __future__ import annotations

_QUESTIONS = [
    "What is the capital of France?",
    "Explain how a bicycle stays upright.",
    "Name three uses of copper.",
    "Who wrote Don Quixote, and when?",
    "Why is the sky blue at noon and red at dusk?",
    "Give me a recipe for pancakes with exact amounts.",
    "How many legs do two spiders and one ant have together?",
    "Translate 'good morning' into Spanish, German and Japanese.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "What should I pack for a week of hiking in autumn?",
    "Write a haiku about rust.",
    "List the planets from the smallest to the largest.",
]
_FRAGMENTS = [
    "Once upon a time, in a village by the sea,",
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM visits WHERE",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam,\n\nI am writing to",
    "BREAKING NEWS:",
    "<html>\n<head>\n<title>",
    "In this paper we show that",
    "Q: What is 17 times 3?\nA:",
    "El perro corre por",
    "Der Zug nach Hamburg fährt",
    "東京は日本の",
    "Москва — столица",
    "🙂🙂🙂",
    "     indented    with   spaces",
    "a",
    "Roses are red,\nViolets are blue,\n",
    '{"name": "Ada", "born": 1815, "known_for":',
    "import numpy as np\n\nx = np.",
    "The mitochondria is",
    "To be, or not to be, that is",
    "CHAPTER ONE\n\nIt was",
    "- apples\n- pears\n-",
    "for (int i = 0; i < n; ++i) {",
    "Ingredients: flour, sugar,",
]
_TOPICS = ["bridges", "bees", "tides", "glass", "the printing press", "volcanoes"]


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _article(topic: str, sentences: int) -> str:
    facts = [
        f"Fact number {i} about {topic}: observers counted {i * i + 7} of them near mile {3 * i}."
        for i in range(sentences)
    ]
    return f"Notes on {topic}.\n" + " ".join(facts) + "\nIn short,"


TEXTS = [
    *map(_chat, _QUESTIONS),
    *_FRAGMENTS,
    *(_article(topic, 2 + 3 * i) for i, topic in enumerate(_TOPICS)),
    *(_chat(_article(topic, 4) + " what do these notes say?") for topic in _TOPICS),
]
assert len(set(TEXTS)) == 50
