"""Every PEFT method that a tiny Llama supports gives the numbers of plain PEFT, or is refused with the reason."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import symbiosis
from symbiosis.core.requests import Key, Pass
from symbiosis.errors import PlaceholderError, PrivacyError, UsageError
from symbiosis.privacy import Wiretap
from symbiosis.testing import Comparison, Job, compare, run_job, run_job_plain, tiny_model
from tests.helpers import CAUSAL, IDS

ON = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": CAUSAL}
TASK = {"task_type": CAUSAL}


def config(name: str, **options: Any) -> Any:
    """Return a configuration of a method, or skip the test if this version of PEFT lacks the method."""
    cls = getattr(peft, f"{name}Config", None)
    if cls is None:
        pytest.skip(f"peft {peft.__version__} has no {name}")
    return cls(**options)


AGREE: dict[str, Callable[[], Any]] = {
    "lora": lambda: config("Lora", init_lora_weights=False, **ON),
    "rslora": lambda: config("Lora", use_rslora=True, init_lora_weights=False, **ON),
    "lora-orthogonal": lambda: config("Lora", init_lora_weights="orthogonal", r=4, **ON),
    "lora-gaussian": lambda: config("Lora", init_lora_weights="gaussian", **ON),
    "lora-bias": lambda: config("Lora", init_lora_weights=False, lora_bias=True, **ON),
    "lora-replicated-layers": lambda: config("Lora", init_lora_weights=False, layer_replication=[[0, 2], [1, 2]], **ON),
    "activated-lora": lambda: config("Lora", init_lora_weights=False, alora_invocation_tokens=[5], **ON),
    "adalora": lambda: config("AdaLora", total_step=100, init_lora_weights=False, **ON),
    "vera": lambda: config("Vera", target_modules=["q_proj"], r=4, **TASK),
    "loha": lambda: config("LoHa", init_weights=False, **ON),
    "lokr": lambda: config("LoKr", init_weights=False, **ON),
    "oft": lambda: config("OFT", oft_block_size=4, init_weights=False, **ON),
    "boft": lambda: config("BOFT", boft_block_size=4, init_weights=False, **ON),
    "fourierft": lambda: config("FourierFT", n_frequency=20, init_weights=False, **ON),
    "waveft": lambda: config("WaveFT", n_frequency=20, **ON),
    "ln-tuning": lambda: config("LNTuning", **TASK),
    "prompt": lambda: config("PromptTuning", num_virtual_tokens=3, **TASK),
    "p-tuning": lambda: config("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=16, **TASK),
    "prefix-projected": lambda: config("PrefixTuning", num_virtual_tokens=3, prefix_projection=True, **TASK),
    "adaption-prompt": lambda: config("AdaptionPrompt", adapter_len=4, adapter_layers=2, **TASK),
    "trainable-tokens": lambda: config("TrainableTokens", token_indices=[3, 4], **TASK),
    "vblora": lambda: config("VBLoRA", vector_length=4, num_vectors=16, topk=2, **ON),
    "miss": lambda: config("Miss", r=4, init_weights=False, **ON),
    "c3a": lambda: config("C3A", block_size=8, **ON),
    "randlora": lambda: config("RandLora", r=4, target_modules=["q_proj"], **TASK),
    "road": lambda: config("Road", group_size=8, **ON),
    "gralora": lambda: config("Gralora", r=8, gralora_k=2, **ON),
    "beft": lambda: config("Beft", **ON),
    "lily": lambda: config("Lily", **ON),
    "pvera": lambda: config("Pvera", r=4, target_modules=["q_proj"], **TASK),
    "unilora": lambda: config("UniLora", **ON),
}

CLOSE: dict[str, Callable[[], Any]] = {
    "dora": lambda: config("Lora", use_dora=True, init_lora_weights=False, **ON),
    "dora-fresh": lambda: config("Lora", use_dora=True, **ON),
    "dora-dropout": lambda: config("Lora", use_dora=True, init_lora_weights=False, lora_dropout=0.2, **ON),
    "dora-rslora": lambda: config("Lora", use_dora=True, use_rslora=True, r=4, init_lora_weights=False, **ON),
    "hra": lambda: config("HRA", r=4, init_weights=False, **ON),
    "hra-orthogonal": lambda: config("HRA", r=4, apply_GS=True, init_weights=False, **ON),
    "deft": lambda: config("Deft", r=4, **ON),
    "deft-relu": lambda: config("Deft", r=4, decomposition_method="relu", **ON),
}
"""Methods that read base weights in plain PEFT, and get what follows from them by other sums here."""

REFUSE: dict[str, Callable[[], Any]] = {
    "pissa": lambda: config("Lora", init_lora_weights="pissa", **ON),
    "pissa-niter": lambda: config("Lora", init_lora_weights="pissa_niter_4", **ON),
    "olora": lambda: config("Lora", init_lora_weights="olora", **ON),
    "adamss": lambda: config("Adamss", r=4, num_subspaces=2, **ON),
    "glora": lambda: config("Glora", **ON),
    "supertuning": lambda: config("Supertuning", **ON),
    "tinylora": lambda: config("TinyLora", **ON),
    "delora": lambda: config("Delora", r=4, **ON),
    "shira": lambda: config("Shira", r=4, **ON),
    "hira": lambda: config("Hira", **ON),
    "peanut": lambda: config("Peanut", **ON),
    "frod": lambda: config("Frod", progressbar=False, **ON),
    "osf": lambda: config("OSF", **ON),
    "psoft": lambda: config("Psoft", r=4, **ON),
    "target-parameters": lambda: config(
        "Lora", target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False, **TASK
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", AGREE)
async def test_agrees_with_plain_peft(method: str) -> None:
    comparison = await compare(tiny_model(), AGREE[method](), Job(steps=3, new_tokens=4))
    assert comparison.bit_equal, comparison
    assert any(name.startswith("gradient") for name in comparison.differences)


async def test_a_parameter_that_is_tied_to_an_embedding_is_adapted() -> None:
    """The tenant has the weight of a tied lm_head, which ``target_parameters`` computes in every forward pass."""
    wanted = config("Lora", target_modules=["q_proj"], target_parameters=["lm_head.weight"], **TASK)
    comparison = await compare(tiny_model(tie_word_embeddings=True), wanted, Job(steps=3, new_tokens=4))
    assert comparison.bit_equal, comparison


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", CLOSE)
async def test_methods_that_read_base_weights_in_plain_peft(method: str) -> None:
    comparison = await compare(tiny_model(), CLOSE[method](), Job(steps=3, new_tokens=4))
    assert comparison.worst("gradient") <= 1e-5, comparison
    assert comparison.worst("logits") <= 1e-5, comparison
    assert comparison.worst("greedy") == comparison.worst("sampled") == 0, comparison
    assert comparison.worst() <= 1e-3, comparison


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", REFUSE)
async def test_a_method_that_reads_base_weights_is_refused(method: str) -> None:
    """The result is never NaN: the error names the method and the missing weights, and the executor continues."""
    wanted = REFUSE[method]()
    async with symbiosis.Executor(tiny_model()) as executor:
        client = executor.client(wanted, name="wants-weights")
        with pytest.raises(PlaceholderError, match=r"base weights|weights of") as caught:
            await client.open()
        assert len(str(caught.value)) > 60
        async with executor.client(name="wants-weights") as client:
            assert torch.isfinite((await client.forward(input_ids=IDS)).logits).all()


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", REFUSE)
async def test_synchronous_code_gets_the_same_refusal(method: str, tmp_path: Path) -> None:
    """The model is as it was before, so the tenant can go on with another method."""
    wanted = REFUSE[method]()
    async with symbiosis.Executor(tiny_model()) as executor:
        with pytest.raises(PlaceholderError) as caught:
            await executor.client(copy.deepcopy(wanted)).open()
        await executor.listen(f"shm://{tmp_path}/s", keep_weights=True)

        def adapt() -> torch.Tensor:
            with symbiosis.open_model(f"shm://{tmp_path}/s") as model:
                names = [name for name, _ in model.named_modules()]
                with pytest.raises(PlaceholderError) as caught_here:
                    peft.get_peft_model(model, wanted)
                assert str(caught_here.value) == str(caught.value)
                assert [name for name, _ in model.named_modules()] == names
                logits: torch.Tensor = peft.get_peft_model(model, peft.LoraConfig(**ON))(input_ids=IDS).logits
                return logits

        adapted = await asyncio.to_thread(adapt)
    torch.testing.assert_close(adapted, tiny_model()(input_ids=IDS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["pissa", "hira", "a typo"])
async def test_add_adapter_goes_on_after_a_refusal(method: str, tmp_path: Path) -> None:
    wanted = REFUSE.get(method, lambda: peft.LoraConfig(target_modules=["typo"]))
    error = PlaceholderError if method in REFUSE else ValueError

    async with symbiosis.Executor(tiny_model()) as executor:
        await executor.listen(f"shm://{tmp_path}/s")

        def adapt() -> None:
            with symbiosis.open_model(f"shm://{tmp_path}/s") as model:
                for _ in range(2):
                    with pytest.raises(error):
                        model.add_adapter(wanted())
                model.add_adapter(peft.LoraConfig(**ON))
                assert model.active_adapters() == ["default"]

        await asyncio.to_thread(adapt)


async def test_an_adapter_that_needs_base_weights_is_not_loaded(tmp_path: Any) -> None:
    """The adapter is one of PiSSA, which changed its base model."""
    model, options = tiny_model(), {"init_lora_weights": "pissa"}
    peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options, **ON)).save_pretrained(str(tmp_path))
    async with symbiosis.Executor(copy.deepcopy(model)) as executor, executor.client() as client:
        with pytest.raises(PlaceholderError, match="init_lora_weights='pissa' factors the base weights"):
            client.load_adapter(tmp_path)


ON_Q = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": CAUSAL}


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    ("present", "differs"),
    [
        (lambda: config("Lora", r=4, lora_alpha=8, **ON_Q), "lora_alpha is 16 there and 8 here"),
        (lambda: config("Lora", r=4, lora_alpha=16, **{**ON_Q, "target_modules": ["k_proj"]}), "target_modules is"),
        (lambda: config("IA3", target_modules=["q_proj"], feedforward_modules=[]), "peft_type is"),
        (lambda: config("Lora", r=4, lora_alpha=16, **ON_Q | {"init_lora_weights": True, "task_type": None}), None),
    ],
)
async def test_an_adapter_in_place_of_one_with_its_name(present: Any, differs: str | None, tmp_path: Path) -> None:
    """PEFT loads the tensors, and keeps the configuration that is there."""
    model = tiny_model()
    adapted = peft.get_peft_model(copy.deepcopy(model), config("Lora", r=4, lora_alpha=16, **ON_Q)).eval()
    adapted.save_pretrained(str(tmp_path))
    async with symbiosis.Executor(model) as executor, executor.client(present()) as client:
        if differs is not None:
            with pytest.raises(UsageError, match=differs):
                client.load_adapter(tmp_path)
            return
        client.load_adapter(tmp_path)
        logits = (await client.forward(input_ids=IDS)).logits
    torch.testing.assert_close(logits, adapted(input_ids=IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", ["lora", "vblora", "p-tuning", "trainable-tokens"])
async def test_an_adapter_is_loaded_again(method: str, tmp_path: Path) -> None:
    """The prompts of p-tuning come from an encoder, which is not in the folder."""
    adapted = peft.get_peft_model(tiny_model(), AGREE[method]()).eval()
    adapted.save_pretrained(str(tmp_path))
    async with symbiosis.Executor(tiny_model()) as executor, executor.client(AGREE[method]()) as client:
        if method == "p-tuning":
            with pytest.raises(UsageError, match="inference_mode is True there and False here"):
                client.load_adapter(tmp_path)
        else:
            client.load_adapter(tmp_path)
        client.load_adapter(tmp_path, name="other")
        client.load_adapter(tmp_path, name="other")
        logits = (await client.forward(input_ids=IDS)).logits
    torch.testing.assert_close(logits, adapted(input_ids=IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", [None, peft.LoraConfig(**ON)])
@pytest.mark.parametrize(("layers", "error"), [(1, "is not complete"), (3, "has no place for 2 of its tensors")])
async def test_an_adapter_of_another_model_is_not_loaded(layers: int, error: str, first: Any, tmp_path: Path) -> None:
    wrong = peft.get_peft_model(tiny_model(num_hidden_layers=layers), config("Lora", **ON_Q))
    wrong.save_pretrained(tmp_path / "wrong")
    right = peft.get_peft_model(tiny_model(), config("Lora", r=2, **ON_Q)).eval()
    right.save_pretrained(tmp_path / "right")
    async with symbiosis.Executor(tiny_model()) as executor, executor.client(copy.deepcopy(first)) as client:
        names = [name for name, _ in client.model.named_modules()]
        with pytest.raises(UsageError, match=error):
            client.load_adapter(tmp_path / "wrong", name="other")
        assert [name for name, _ in client.model.named_modules()] == names
        assert torch.isfinite((await client.forward(input_ids=IDS)).logits).all()
        client.load_adapter(tmp_path / "right", name="other")
        logits = (await client.forward(input_ids=IDS)).logits
        assert set(client.model.peft_config) == ({"other"} if first is None else {"default", "other"})
    torch.testing.assert_close(logits, right(input_ids=IDS).logits, rtol=0, atol=1e-5)


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
async def test_an_adapter_without_values_is_loaded(tmp_path: Path) -> None:
    """With ``low_cpu_mem_usage``, an adapter is on the meta device until it is loaded. torch's product of rows with it
    is uninitialised memory."""
    model, load = tiny_model(), peft.PeftModel.from_pretrained
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(init_lora_weights=False, **ON))
    adapted.save_pretrained(str(tmp_path))
    async with symbiosis.Executor(model) as executor, executor.client() as client:
        loaded = load(client.model, str(tmp_path), low_cpu_mem_usage=True)
        logits = (await client.run(loaded, input_ids=IDS)).logits
    torch.testing.assert_close(logits, adapted.eval()(input_ids=IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights:UserWarning")
async def test_a_pissa_adapter_that_was_converted_is_loaded(tmp_path: Path) -> None:
    """This is what the refusal of PiSSA recommends."""
    model = tiny_model()
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, init_lora_weights="pissa", **ON))
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(str(tmp_path / "start"))
    adapted.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(0.01)
    expected = adapted.eval()(input_ids=IDS).logits
    start = str(tmp_path / "start")
    adapted.save_pretrained(str(tmp_path / "lora"), path_initial_model_for_weight_conversion=start)
    async with symbiosis.Executor(model) as executor, executor.client() as client:
        client.load_adapter(tmp_path / "lora")
        torch.testing.assert_close((await client.forward(input_ids=IDS)).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"use_dora": True}, {}])
@pytest.mark.parametrize("first", [None, peft.LoraConfig(**ON), peft.LoraConfig(use_dora=True, **ON)])
async def test_loading_beside_dora(options: dict[str, Any], first: Any, tmp_path: Path) -> None:
    """Adapters with and without DoRA, from plain PEFT, are loaded without a request, also beside one another."""
    model = tiny_model()
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(init_lora_weights=False, **options, **ON))
    adapted.save_pretrained(str(tmp_path))
    async with symbiosis.Executor(model) as executor, executor.client(copy.deepcopy(first)) as client:
        client.load_adapter(tmp_path, name="loaded")
        logits = (await client.forward(input_ids=IDS)).logits
    torch.testing.assert_close(logits, adapted.eval()(input_ids=IDS).logits, rtol=0, atol=1e-5)


async def test_dora_of_gpt2_and_of_a_model_in_bf16() -> None:
    """Conv1D has its weight the other way round. In bf16, plain PEFT rounds W + s·B·A when it is initialised."""
    model = tiny_model("gpt2")
    on = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "task_type": CAUSAL}
    wanted = peft.LoraConfig(use_dora=True, init_lora_weights=False, **on)
    comparison = await compare(model, wanted, Job(steps=2, new_tokens=0))
    assert comparison.worst("gradient") <= 1e-5, comparison
    wanted = peft.LoraConfig(use_dora=True, init_lora_weights=False, **ON)
    comparison = await compare(tiny_model().bfloat16(), wanted, Job(steps=2, new_tokens=0))
    assert comparison.worst("logits") <= 2e-2, comparison
    assert comparison.worst("gradient") <= 5e-2, comparison


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("address", ["shm://{}/s", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("method", ["dora", "hra", "deft"])
async def test_synchronous_code_with_methods_that_read_base_weights(method: str, address: str, tmp_path: Path) -> None:
    def losses_and_gradients(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, CLOSE[method]())
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
        found = []
        for _ in range(2):
            loss = adapted(input_ids=IDS, labels=IDS).loss
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in adapted.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    def opened(address: str) -> list[torch.Tensor]:
        with symbiosis.open_model(address) as model:
            return losses_and_gradients(model)

    expected = losses_and_gradients(tiny_model())
    async with symbiosis.Executor(tiny_model()) as executor:
        listener = await executor.listen(address.format(tmp_path), keep_weights=True)
        found = await asyncio.to_thread(opened, listener.address)
    assert len(found) == len(expected) > 10
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("options", [{"window": 4}, {"prune": True}, {"checkpointing": True}])
async def test_dora_in_windows_with_pruning_and_with_checkpointing(options: dict[str, Any]) -> None:
    wanted = peft.LoraConfig(use_dora=True, init_lora_weights=False, **ON)
    step = {name: value for name, value in options.items() if name != "checkpointing"}

    def prepare(model: Any) -> None:
        if "checkpointing" in options:
            model.gradient_checkpointing_enable()

    expected = run_job_plain(tiny_model(), wanted, Job(steps=3, new_tokens=0, prepare=prepare))
    async with symbiosis.Executor(tiny_model()) as executor, executor.client(wanted, seed=0) as client:
        prepare(client.model)
        optimizer = torch.optim.AdamW([p for p in client.model.parameters() if p.requires_grad], lr=Job().learning_rate)
        job = Job()
        losses = [await client.train_step(job.batch(n, torch.device("cpu")), optimizer, **step) for n in range(3)]
    assert losses == pytest.approx(expected.losses, rel=1e-4)


async def test_dora_on_a_weight_of_ones_own() -> None:
    model, wanted = tiny_model(), peft.LoraConfig(use_dora=True, init_lora_weights=False, **ON)
    torch.manual_seed(0)
    expected = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(wanted)).eval()(input_ids=IDS).logits

    def adapt(model: Any) -> torch.Tensor:
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.requires_grad_(True)
        logits: torch.Tensor = peft.get_peft_model(model, wanted).eval()(input_ids=IDS).logits
        return logits

    async with symbiosis.Executor(model) as executor, executor.client(seed=0) as client:
        torch.testing.assert_close(await client.run(adapt, client.model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("address", ["shm://{}/s", "tcp://127.0.0.1:0"])
async def test_nothing_of_a_weight_is_sent_but_norms(address: str, tmp_path: Path) -> None:
    """DoRA asks once for the norms of a layer, and for as many rows as its rank whenever A has changed."""
    model = tiny_model()
    config = peft.LoraConfig(use_dora=True, r=4, init_lora_weights=False, target_modules=["q_proj"], **TASK)
    job = Job(steps=2, new_tokens=3)
    expected = run_job_plain(model, config, job)
    async with symbiosis.Executor(copy.deepcopy(model)) as executor:
        listener = await executor.listen(address.format(tmp_path), keep_weights=True)
        with Wiretap(executor) as tap:
            async with symbiosis.connect(listener.address) as base, base.client(config, seed=0) as client:
                found = await run_job(client, job)
        layers = [spec.layer for spec in executor.layers if spec.name.endswith("q_proj")]
    comparison = Comparison.of(found, expected)
    assert max(comparison.worst("gradient"), comparison.worst("logits")) <= 1e-5, comparison
    for layer, block in zip(layers, model.model.layers, strict=True):
        (norms,) = [seen for seen in tap.seen if seen.key == Key((layer,), Pass.NORMS)]
        assert norms.results is not None
        torch.testing.assert_close(norms.results[0], block.self_attn.q_proj.weight.norm(dim=1)[None])
        products = [seen for seen in tap.seen if seen.key == Key((layer,), Pass.FORWARD_WITHOUT_BIAS)]
        assert [len(seen.tensors[0]) for seen in products] == [4, 4]  # at first, and after the first of two steps


async def test_dora_of_a_client_whose_rows_are_masked() -> None:
    async with symbiosis.Executor(tiny_model()) as executor:
        client = executor.client(peft.LoraConfig(use_dora=True, **ON), privacy="noise-pool")
        with pytest.raises(PrivacyError, match=r"DoRA asks for norms of weights.*use LoRA"):
            await client.open()


@pytest.mark.filterwarnings("ignore:lora with eva initialization used:UserWarning")
async def test_eva_from_layer_inputs() -> None:
    """EVA factors what the layers read, not their weights."""
    model, batches = tiny_model(), [{"input_ids": (IDS + 7 * number) % 60} for number in range(3)]
    wanted = peft.LoraConfig(r=4, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0), **ON)

    def prepare(model: Any) -> None:
        peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)

    comparison = await compare(model, wanted, Job(steps=3, new_tokens=4, prepare=prepare))
    assert comparison.bit_equal, comparison


async def test_a_refusal_of_lora_does_not_recommend_lora(base: Any) -> None:
    wanted = config("Lora", trainable_token_indices={"lm_head": [3]}, **ON)
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(PlaceholderError, match=r"LORA reads the weights.*leave out the option that needs them"):
            await executor.client(wanted).open()


async def test_a_target_that_plain_peft_refuses_too(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(ValueError, match=r"(?s)^Target module LlamaMLP.*VirtLinear.*is not supported"):
            await executor.client(config("Lora", target_modules=["mlp"], **TASK)).open()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
async def test_an_adapter_beside_one_that_has_diverged(base: Any, value: float) -> None:
    async with symbiosis.Executor(base) as executor, executor.client(config("Lora", **ON)) as client:
        with torch.no_grad():
            for parameter in client.model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(value)
        client.model.add_adapter("other", config("Lora", init_lora_weights=False, **ON))
        client.model.set_adapter("other")
        assert (await client.forward(input_ids=IDS)).logits.isfinite().all()


async def test_an_adapter_of_transformers_own_integration_is_saved(tmp_path: Path) -> None:
    """``model.add_adapter`` makes no PeftModel. ``save_pretrained``, which Trainer calls, saves only the adapter."""
    model = tiny_model()
    async with symbiosis.Executor(copy.deepcopy(model)) as executor, executor.client() as client:
        with pytest.raises(PlaceholderError, match="cannot be saved as a whole"):
            client.model.save_pretrained(tmp_path)
        client.model.add_adapter(config("Lora", init_lora_weights=False, **ON))
        expected = (await client.forward(input_ids=IDS)).logits
        for adapted in (client.model, copy.deepcopy(client.model)):
            adapted.save_pretrained(tmp_path)
            loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path))
            torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)
            assert not (tmp_path / "model.safetensors").exists()


async def test_merging_is_refused(base: Any) -> None:
    """merge_adapter and merge_and_unload write into base weights, which the client lacks: they raise, and change
    nothing.
    """
    config = peft.LoraConfig(init_lora_weights=False, **ON)
    async with symbiosis.Executor(base) as executor, executor.client(config) as client:
        before = (await client.forward(input_ids=IDS)).logits
        for merge in (client.model.merge_adapter, client.model.merge_and_unload):
            with pytest.raises(PlaceholderError, match="nothing can be merged"):
                await client.run(merge)
        assert torch.equal((await client.forward(input_ids=IDS)).logits, before)
