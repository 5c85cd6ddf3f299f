"""Small texts, token files, tokenizers and language models for the scripts; see prepare.py."""

import json
import pickle
import random

TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one had
not but what all were when we there can an your which their said if do will each about how up
out them then she many some so these would other into has more her two like him see time could
no make than first been its who now people my made over did down only way find use may water
long little very after words called just where most know
"""
WORDS = TEXT.split()


def sentence(generator, least=4, most=24):
    """A sentence of common words: their number is drawn between least and most."""
    return " ".join(generator.choices(WORDS, k=generator.randint(least, most))).capitalize() + "."


def write(path, content):
    """Write text or bytes, and make the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(rows):
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def characters(folder):
    """Token files of nanoGPT: characters of random sentences as numbers, and what they mean."""
    import numpy

    text = " ".join(sentence(random.Random(number)) for number in range(600))
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    tokens = numpy.array([numbers[character] for character in text], dtype=numpy.uint16)
    data = folder / "data" / "shakespeare_char"
    write(data / "train.bin", tokens[:-4000].tobytes())
    write(data / "val.bin", tokens[-4000:].tobytes())
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": numbers}
    write(data / "meta.pkl", pickle.dumps(meta))


def text(folder):
    """A text of random sentences for the character model of minGPT."""
    sentences = [sentence(random.Random(number)) for number in range(60)]
    write(folder / "data" / "input.txt", "\n".join(sentences) + "\n")


def word_tokenizer(folder, **special):
    """A tokenizer of the common words, as files that every version of transformers loads."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    names = list(special.values())
    vocabulary = {word: number for number, word in enumerate([*names, *sorted(set(WORDS)), "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.add_special_tokens(names)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if "cls_token" in special:
        pair = [special[kind] for kind in ("sep_token", "cls_token")]
        tokenizer.post_processor = processors.BertProcessing(*[(t, vocabulary[t]) for t in pair])
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    write(folder / "tokenizer_config.json", json.dumps({**settings, **special}))
    return len(vocabulary)


def small_bert(folder):
    """A BERT of two small layers with its tokenizer, as a folder that transformers loads."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    size = word_tokenizer(folder, **names)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


METRIC = '''"""Accuracy, under the name that the script asks for."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="accuracy",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
'''


def mrpc(folder):
    """Pairs of sentences in place of GLUE MRPC, an accuracy, and a small BERT."""
    rows = []
    for number in range(360):
        generator = random.Random(number)
        pair = {f"sentence{side}": sentence(generator) for side in (1, 2)}
        rows.append({**pair, "label": generator.randint(0, 1), "idx": number})
    splits = {"train": rows[:320], "validation": rows[320:340], "test": rows[340:]}
    hub_data_set(folder / "nyu-mll" / "glue", "mrpc", splits)
    write(folder / "glue" / "glue.py", METRIC)
    small_bert(folder / "bert-base-cased")


def hub_data_set(folder, config, splits):
    """Rows of several splits as a folder that load_dataset takes for a data set of the hub."""
    header = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        write(folder / f"{split}.jsonl", lines(rows))
        header += [f"  - split: {split}", f"    path: {split}.jsonl"]
    write(folder / "README.md", "\n".join([*header, "---", ""]))


def wikitext(folder):
    """Paragraphs of 1 to 30 words in place of WikiText-2, and a small Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [{"text": sentence(random.Random(number), 1, 30)} for number in range(540)]
    splits = {"train": rows[:510], "validation": rows[510:]}
    hub_data_set(folder / "Salesforce" / "wikitext", "wikitext-2-v1", splits)
    model = folder / "HuggingFaceTB" / "SmolLM-360M"
    size = word_tokenizer(model, unk_token="<unk>", eos_token="<|endoftext|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(model)


def wikitext_words(folder):
    """The text file that the demo data set of Lightning would download: 180,000 words."""
    generator = random.Random(0)
    text = "\n".join(sentence(generator, 20, 40) for _ in range(6000))
    write(folder / "data" / "wikitext-2.txt", text + "\n")


def token_shards(folder):
    """Token files of llama2.c: two shards of 16-bit numbers below 64."""
    import numpy

    for shard in range(2):
        tokens = numpy.random.default_rng(shard).integers(2, 64, 8000).astype(numpy.uint16)
        tokens[::20] = 1
        write(folder / "data" / "tok64" / f"data{shard:02}.bin", tokens.tobytes())


def instructions(folder):
    """Instructions with answers of 1 to 30 words, and a small OPT."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    rows = []
    for number in range(120):
        generator = random.Random(number)
        row = {"instruction": sentence(generator, 3, 8), "input": ""}
        rows.append({**row, "output": sentence(generator, 1, 30)})
    write(folder / "instructions.json", json.dumps(rows))
    model = folder / "small_opt"
    names = {f"{kind}_token": f"<{kind}>" for kind in ("pad", "bos", "eos", "unk")}
    size = word_tokenizer(model, **names)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=size,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    OPTForCausalLM(config).save_pretrained(model)


def sharded_checkpoint(folder):
    """The weights that the FSDP2 example finds as a checkpoint, made of its own model."""
    import runpy

    import torch

    module = runpy.run_path(str(folder / "model.py"))
    sizes = {"n_layers": 10, "n_heads": 4, "vocab_size": 1024, "max_seq_len": 64, "dropout_p": 0}
    torch.manual_seed(0)
    model = module["Transformer"](module["ModelArgs"](**sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    place = folder / "checkpoints" / "dtensor_api" / "1"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), place / "model_state_dict.pt")
    torch.save(optimizer.state_dict(), place / "optim_state_dict.pt")


def triplets(folder):
    """Triplets and scored pairs in place of AllNLI and STS benchmark, and a small BERT."""
    generator = random.Random(0)
    names = ("anchor", "positive", "negative")
    rows = [{name: sentence(generator, 3, 12) for name in names} for _ in range(11000)]
    data = folder / "sentence-transformers"
    hub_data_set(data / "all-nli", "triplet", {"train": rows[:10000], "dev": rows[10000:]})
    pairs = [
        {"sentence1": row["anchor"], "sentence2": row["positive"], "score": generator.random()}
        for row in rows[:64]
    ]
    hub_data_set(data / "stsb", "default", {"validation": pairs[:32], "test": pairs[32:]})
    small_bert(folder / "small_bert")
