"""Text for tests."""

from __future__ import annotations

SAMPLE_TEXTS = [
    "def area(width, height):\n\treturn width * height\n\n\nimport os\n\n\nimport re\n\n\nx = 1\n",
    "for index in range(10):\n    if index % 2:\n        print('odd', index)\n",
    "Größe, naïve café, 数据 и данные: 1234567890\n",
    "the quick brown fox jumps over the lazy dog; the dog sleeps on\n",
] * 40
