"""Which of the world's classifiers convert, agree with torch, and run in our kernels.

Each model has random weights and a seed of its own. It is exported with a dynamic batch, compiled
in float32 or another dtype, and compared with torch in float64 on two random images; the error is
the largest difference of the logits, as a share of their largest value. Beside it stands torch's
own error in that dtype.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from maxvision.bench import records
from maxvision.bench.environment import environment
from maxvision.common.console import working
from maxvision.common.errors import UserError

TIMM = """
timm/beit_base_patch16_224 timm/caformer_s18 timm/cait_xxs24_224 timm/coat_tiny timm/convit_tiny
timm/convmixer_768_32 timm/convnext_femto timm/cpubone_nano timm/crossvit_tiny_240
timm/cs3darknet_s timm/csatv2 timm/cspnext_tiny timm/davit_tiny timm/deepseek_vit_412m
timm/deit_tiny_patch16_224 timm/densenet121 timm/dla34 timm/dpn68 timm/edgenext_small
timm/efficientformer_l1 timm/efficientformerv2_s0 timm/efficientnet_b0 timm/efficientvim_m1
timm/efficientvit_b0 timm/efficientvit_m1 timm/ese_vovnet19b_slim timm/eva02_tiny_patch14_224
timm/fasternet_s timm/fastvit_s12 timm/focalnet_tiny_lrf timm/gcvit_xxtiny timm/gemma4_vit_167m
timm/gernet_s timm/ghostnet_050 timm/halonet26t timm/hardcorenas_a timm/hgnet_tiny
timm/hiera_tiny_224 timm/hrnet_w18_small timm/iformer_s timm/inception_next_atto
timm/inception_resnet_v2 timm/inception_v3 timm/inception_v4 timm/lcnetv2_small
timm/legacy_seresnet18 timm/levit_384_s8 timm/lowformer_b0 timm/mambaout_femto
timm/maxvit_pico_rw_256 timm/mixer_s16_224 timm/mobilenetv3_small_050 timm/mobilenetv5_300m
timm/mobilevit_xxs timm/mvitv2_tiny timm/naflexvit_base_patch16_siglip timm/nasnetalarge
timm/nest_tiny timm/nextvit_small timm/nf_seresnet26 timm/pit_xs_224 timm/pnasnet5large
timm/pvt_v2_b0 timm/qwen3_vit_88m timm/rdnet_tiny timm/regnety_002 timm/repghostnet_050
timm/repvit_m1 timm/res2net50_26w_4s timm/resnest26d timm/resnet18 timm/resnetv2_18
timm/rexnet_150 timm/sam2_hiera_tiny timm/samvit_base_patch16 timm/selecsls42 timm/sequencer2d_s
timm/shvit_s1 timm/skresnet18 timm/starnet_s1 timm/swiftformer_xs timm/swin_s3_tiny_224
timm/swinv2_cr_tiny_224 timm/swinv2_tiny_window8_256 timm/tiny_vit_5m_224 timm/tnt_s_patch16_224
timm/tresnet_l timm/twins_svt_small timm/vgg11_bn timm/visformer_tiny
timm/vit_relpos_small_patch16_224 timm/vit_tiny_patch16_224 timm/vit_tiny_r_s16_p8_224
timm/vitamin_small_224 timm/volo_d1_224 timm/xception timm/xception41 timm/xcit_nano_12_p8_224
""".split()
"""One small model of each of timm's files."""
TORCHVISION = tuple(
    f"torchvision/{name}"
    for name in (
        "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "maxvit_t",
        "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18",
        "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn",
        "vit_b_16", "wide_resnet50_2",
    )
)  # fmt: skip
"""torchvision's classics."""
TRANSFORMERS = tuple(
    f"transformers/{kind}"
    for kind in (
        "beit", "bit", "clip", "convnext", "convnextv2", "cvt", "data2vec-vision", "deit", "dinat",
        "dinov2", "dinov2_with_registers", "donut-swin", "efficientnet", "focalnet", "hgnet_v2",
        "hiera", "ijepa", "imagegpt", "levit", "metaclip_2", "mobilenet_v1", "mobilenet_v2",
        "mobilevit", "mobilevitv2", "perceiver", "poolformer", "pp_lcnet", "pvt", "pvt_v2",
        "regnet", "resnet", "segformer", "shieldgemma2", "siglip", "siglip2", "swiftformer",
        "swin", "swinv2", "textnet", "vit", "vit_msn",
    )
)  # fmt: skip
"""transformers' classifiers as it configures them, but that stacks of equal layers have four."""
TASKS = tuple(
    f"maxvision.bench.tasks:{name}"
    for name in ("bert", "roberta", "gpt2", "t5_encoder", "deeplabv3", "fpn", "messages")
)
"""Networks of texts, of graphs, and with maps for answers."""


def run(options: argparse.Namespace) -> int:
    """Converts every model, prints a row for each as it comes, and writes all to ``--json``."""
    if options.page:
        print(page(json.loads(options.page.read_text())), end="")
        return 0
    records.check_path(options.json)
    facts = environment()
    done: list[dict[str, Any]] = []
    if options.json and options.json.is_file():  # goes on where it stopped
        done = json.loads(options.json.read_text())["records"]
    named = options.models or [*TIMM, *TRANSFORMERS, *TORCHVISION, *TASKS]
    for source in named:
        if any(each["model"] == source for each in done):
            continue
        row = convert(source, options)
        done.append(row)
        print(_line(row), flush=True)
        if options.json:
            records.write(options.json, facts, done)
    good = sum("problem" not in row for row in done)
    print(f"{good} of {len(done)} convert{' and agree' * options.compare}")
    return int(good < len(done))


def convert(source: str, options: argparse.Namespace) -> dict[str, Any]:
    """Converts a model, and says what became of it."""
    from maxvision.bridge import sources
    from maxvision.bridge.convert import compared, report, translated

    start = time.perf_counter()
    row: dict[str, Any] = {"model": source}
    try:
        with working(f"converting {source}") as say:
            model = sources.find(source, random=True)
            traced = translated(model)
            told = report(model, traced, options.device, "float32")
            found = told.coverage
            row |= {
                "gmac": round(found.macs / 1e9, 3),
                "kernels": dict(found.kernels),
                "others": dict(found.others),
                "convert_s": round(time.perf_counter() - start, 1),
            }
            if options.compare:
                told = compared(
                    told, model, traced, options.device, dtype=options.dtype, stages=False,
                    progress=say,
                )  # fmt: skip
                worst = told.worst
                assert told.cost
                row |= {
                    "error": float(f"{worst.error:.2g}"),
                    "torch_error": float(f"{worst.own:.2g}"),
                    "compile_s": round(told.cost.seconds["compile"], 1),
                }
                if not worst.within:
                    row["problem"] = f"{worst.name}: an error of {worst.error:.1e}"
    except UserError as error:
        row["problem"] = str(error)
    except Exception as error:  # of the library that makes the model
        row["problem"] = f"{type(error).__name__}: {error}"
    return row


def _line(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"{row['model']}: {row['problem']}"
    error = f", error {row['error']:.1e} (torch {row['torch_error']:.1e})" if "error" in row else ""
    others = ", ".join(f"{op} {n}" for op, n in row["others"].items()) or "none"
    return f"{row['model']}: {row['gmac']:.2f} GMAC{error}; MAX's own: {others}"


_PAGE = """\
# Models that convert

{good} of the {count} models below convert{agree}: a small model of each of timm's files,
transformers' classifiers of pictures, torchvision's classics, and networks of texts, graphs and
maps (bench/tasks.py), with random weights. All multiplications of convolutions, linear layers,
products and attention run in our kernels; "MAX's kernels" are the other ops that compute. The error
is that of the outputs in float32 against torch's float64, as a share of the largest. Beside it
stands torch's own; without it, the model cannot run in float64, and torch's float32 is the
reference. Written by `maxvision bench universe --page
FILE`; measured on {date} ({cpu};
torch {torch}{note}).

| model | GMAC | our kernels | MAX's kernels | error | torch's |
| --- | --- | --- | --- | --- | --- |
"""


def page(found: dict[str, Any]) -> str:
    """Writes the page docs/models.md of what ``--json`` holds."""
    rows = found["records"]
    good = [row for row in rows if "problem" not in row]
    facts = {"date": "", "cpu": "", "torch": "", "note": "", **found["environment"]}
    if facts["note"]:
        facts["note"] = f"; {facts['note']}"
    agree = " and agree with torch" * all("error" in row for row in good)
    text = _PAGE.format(good=len(good), count=len(rows), agree=agree, **facts)
    for row in sorted(good, key=lambda row: row["model"]):
        others = ", ".join(row["others"]) or "none"
        errors = [f"{row[key]:.1e}" if row.get(key) else "" for key in ("error", "torch_error")]
        kernels = sum(row["kernels"].values())
        cells = [row["model"], f"{row['gmac']:.2f}", str(kernels), others, *errors]
        text += f"| {' | '.join(cells)} |\n"
    bad = [row for row in rows if "problem" in row]
    if bad:
        text += "\n## Models that do not convert\n\n| model | why |\n| --- | --- |\n"
        text += "".join(f"| {row['model']} | {row['problem']} |\n" for row in bad)
    return text
