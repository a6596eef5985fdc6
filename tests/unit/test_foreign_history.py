"""What a part of another server's history says to a model."""

import base64
import random

import pytest

from server.generation.foreign_history import MAX_CHARACTERS, OPAQUE_CHARACTERS, foreign_note

SENTENCES = {
    "Chinese": "检索结果显示该文件于上周更新并且包含全部测试数据",
    "Japanese": "検索結果によるとこのファイルは先週更新されました",
    "Thai": "ผลการค้นหาแสดงว่าไฟล์นี้ได้รับการปรับปรุงเมื่อสัปดาห์ที่แล้ว",
    "Khmer": "លទ្ធផលស្វែងរកបង្ហាញថាឯកសារនេះត្រូវបានធ្វើបច្ចុប្បន្នភាព",
    "English": "The search says that the file was changed last week. ",
}


@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize("n_characters", [10, OPAQUE_CHARACTERS, 3 * OPAQUE_CHARACTERS])
def test_language_is_told_with_or_without_spaces(language: str, n_characters: int) -> None:
    sentence = SENTENCES[language]
    text = (sentence * n_characters)[:n_characters].strip()
    note = foreign_note("web_search_call", {"results": [{"id": "1", "text": text}]})
    assert note is not None
    assert text in note


@pytest.mark.parametrize("seed", range(5))
def test_data_is_not_told(seed: int) -> None:
    data = random.Random(seed).randbytes(1_000)
    for written in (data.hex(), base64.b64encode(data).decode(), base64.b85encode(data).decode()):
        assert foreign_note("image_generation_call", {"result": written}) is None
        told = foreign_note("computer_call", {"said": "clicked", "screen": {"bytes": written}})
        assert told == '[computer_call: {"said": "clicked"}]'


def test_a_long_text_is_cut_and_says_so() -> None:
    note = foreign_note("mcp_call", {"output": "a word " * 1_000})
    assert note is not None
    assert len(note) < MAX_CHARACTERS + 100
    assert "more characters" in note
