"""Small pictures and models that see, for the public training scripts; see prepare.py."""

import json
import struct

from prepare_text import sentence, write


def picture(number, size=48):
    """A picture of coloured noise around a colour of its own."""
    import numpy
    from PIL import Image

    generator = numpy.random.default_rng(number)
    colour = generator.integers(40, 215, 3)
    noise = generator.integers(-40, 40, (size, size, 3))
    return Image.fromarray((colour + noise).astype(numpy.uint8))


def save_picture(path, number, size=48):
    """One picture as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number, size).save(path)


def pictures(folder):
    """Folders data/train and data/val, with 64 and 16 pictures of two classes."""
    for split, count in (("train", 64), ("val", 16)):
        for number in range(count):
            name = f"{number:03}.png"
            save_picture(folder / "data" / split / "ab"[number % 2] / name, 1000 * count + number)


def pictures_and_hub(folder):
    """The pictures, and an empty torch.hub repository, which DINO lists as it starts."""
    pictures(folder)
    write(folder / "torch_home" / "hub" / "facebookresearch_xcit_main" / "hubconf.py", "")


def digits(folder):
    """Files in the format of MNIST, with noise for digits, where Lightning's examples look."""
    import numpy

    raw = folder.joinpath("..", "..", "..", "Datasets", "MNIST", "raw").resolve()
    for split, count in (("train", 256), ("t10k", 32)):
        generator = numpy.random.default_rng(count)
        images = generator.integers(0, 256, (count, 28, 28)).astype(numpy.uint8)
        labels = generator.integers(0, 10, count).astype(numpy.uint8)
        header = struct.pack(">iiii", 2051, count, 28, 28)
        write(raw / f"{split}-images-idx3-ubyte", header + images.tobytes())
        write(
            raw / f"{split}-labels-idx1-ubyte", struct.pack(">ii", 2049, count) + labels.tobytes()
        )


def captions(folder):
    """Pictures with captions in a table, and the configuration of a small CLIP."""
    import random

    rows = ["filepath\ttitle"]
    for number in range(64):
        path = f"pictures/{number:03}.png"
        save_picture(folder / path, number)
        rows.append(f"{path}\t{sentence(random.Random(number), 2, 10)}")
    write(folder / "captions.csv", "\n".join(rows) + "\n")
    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    model = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}
    write(
        folder / "small_clip" / "open_clip_config.json",
        json.dumps({"model_cfg": model, "preprocess_cfg": {}}),
    )


def diffusion(folder):
    """The pictures, and the configuration of a small UNet for 16 by 16 pixels."""
    pictures(folder)
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": [8, 16],
        "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"],
        "norm_num_groups": 4,
    }
    write(folder / "unet" / "config.json", json.dumps(config))


def vqgan(folder):
    """The pictures, a small VQGAN and discriminator, and a network for the perceptual loss."""
    import timm
    import torch
    from safetensors.torch import save_file

    pictures(folder)
    model = {
        "_class_name": "VQModel",
        "block_out_channels": [8, 16],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "num_vq_embeddings": 32,
        "sample_size": 32,
        "vq_embed_dim": 4,
    }
    write(folder / "vqmodel" / "config.json", json.dumps(model))
    discriminator = {"_class_name": "Discriminator", "hidden_channels": 32, "depth": 4}
    write(folder / "discriminator" / "config.json", json.dumps(discriminator))
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False)
    config = {
        "architecture": "test_resnet",
        "num_classes": network.num_classes,
        "pretrained_cfg": {"input_size": [3, 64, 64], "crop_pct": 1.0, "fixed_input_size": False},
    }
    write(folder / "perceptual" / "config.json", json.dumps(config))
    save_file(network.state_dict(), folder / "perceptual" / "model.safetensors")
