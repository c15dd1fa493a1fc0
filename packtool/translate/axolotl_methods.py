"""Translation of axolotl's training methods: weighted losses, training for quantization, routers and embeddings."""

from __future__ import annotations

from typing import Any

from packtool.translate.names import Translation, as_text, is_true
from packtool.translate.read import local_model_config


def translate_methods(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the keys of training methods in ``values``, and remove them."""
    if is_true(values.pop("use_eaft", None)):
        alpha = values.pop("eaft_alpha", None)
        translation.set("eaft_alpha", 1.0 if alpha is None else alpha, "use_eaft and eaft_alpha")
        translation.set("eaft_top_k", values.pop("eaft_k", None) or 20, "use_eaft and eaft_k")
        translation.set("eaft_divisor", 1.0, "use_eaft: axolotl does not divide the entropy")
    name = "tensor_parallel_size"
    if (tensor_size := int(translation.number(name, values.get(name), 1))) > 1:
        del values[name]
        # Processes that divide each matrix train the same batches as processes that divide each sequence.
        context_size = int(translation.number("context_parallel_size", values.pop("context_parallel_size", None), 1))
        origin = "tensor_parallel_size x context_parallel_size: processes divide sequences, not matrices"
        translation.set("sequence_parallel_size", tensor_size * context_size, origin)
    if settings := values.pop("qat", None):
        _axolotl_qat(translation, settings)
    if as_text((values.get("model_config") or {}).get("output_router_logits", "")) == "true":
        _axolotl_router(translation, values)
    if is_true(values.get("resize_token_embeddings_to_32x")):
        _axolotl_embeddings(translation, values)


_QAT_FORMATS = {"float8": "fp8", "float8_e4m3fn": "fp8"}
_QAT_RECIPES = {  # by the formats of inputs and weights
    ("int8", "int4"): "int8-int4",
    ("None", "int4"): "int4",
    ("fp8", "int4"): "fp8-int4",
    ("fp8", "fp8"): "fp8",
    ("mxfp4", "mxfp4"): "mxfp4",
    ("nvfp4", "nvfp4"): "nvfp4",
}


def _axolotl_qat(translation: Translation, settings: Any) -> None:
    """Translate ``qat``: formats of activations and weights, groups of weights, and the first step with rounding."""
    if not isinstance(settings, dict):
        translation.refuse("qat", "expected an object with weight_dtype and activation_dtype")
        return
    formats = (str(settings.get(f"{kind}_dtype")) for kind in ("activation", "weight"))
    inputs, weights = (_QAT_FORMATS.get(each, each) for each in formats)
    recipe = _QAT_RECIPES.get((inputs, weights))
    if recipe is None or is_true(settings.get("quantize_embedding")):
        known = ", ".join(_QAT_RECIPES.values())
        translation.refuse(f"qat: {as_text(settings)}", f"--qat rounds linear layers, to {known}")
        return
    translation.set("qat", recipe, "qat: activation_dtype and weight_dtype")
    if weights == "int4":
        translation.set("qat_group_size", settings.get("group_size") or 32, "qat: group_size")
    if start := settings.get("fake_quant_after_n_steps"):
        translation.set("qat_start_step", start, "qat: fake_quant_after_n_steps")


def _axolotl_router(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``output_router_logits``: the model then adds its routers' loss with the weight in config.json."""
    weight = local_model_config(values, "base_model").get("router_aux_loss_coef")
    name = "model_config: output_router_logits"
    if weight is None:
        translation.refuse(
            name, "its weight is not known without the model's config.json; give a local directory of the model"
        )
    else:
        translation.set("router_aux_loss_coef", weight, name)
    others = {key: value for key, value in values.pop("model_config").items() if key != "output_router_logits"}
    if others:
        values["model_config"] = others


def _axolotl_embeddings(translation: Translation, values: dict[str, Any]) -> None:
    """Refuse embeddings that would grow: those of a local model whose number of rows is no multiple of 32."""
    config = local_model_config(values, "base_model")
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if isinstance(size, int) and size % 32:
        del values["resize_token_embeddings_to_32x"]
        reason = f"it adds {-size % 32} rows to the embeddings, packtool adds none; remove it"
        translation.refuse("resize_token_embeddings_to_32x", reason)
