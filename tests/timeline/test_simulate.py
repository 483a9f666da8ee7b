"""Timelines of programs of a few instructions, each worked out by hand in its test.

The machine of `programs` has round figures: a kernel that writes 100 bytes takes 1 s, a product of 1000 FLOPs
1 s, a copy of 10 bytes to the host 1 s, one of 20 bytes from it 1 s.
"""

import pytest
from programs import (
    CONDITION,
    START,
    WIDE,
    all_gather,
    argument,
    computation,
    exposed,
    from_host,
    gathered,
    hlo,
    kernel,
    loop,
    machine,
    metadata,
    on_device,
    on_host,
    product,
    repeated,
    run,
    timeline,
    to_host,
)

from forebay.xla.schedule import short_name

approx = pytest.approx


def step(*entry: str, others: tuple[str, ...] = (), devices: int = 4) -> str:
    body = "\n".join(entry)
    return hlo(f"{body}\nROOT %end = () tuple()", *others, devices=devices)


# --- the compute stream -----------------------------------------------------------------------------


def test_kernels_run_one_after_another():
    assert run(step(kernel("a", 200), kernel("b", 300))).seconds == approx(5)


def test_a_product_takes_its_arithmetic_or_its_bytes_whichever_is_longer():
    # 1000 FLOPs: 1 s; two operands of 500 bfloat16 and a float32: 2004 bytes, 20.04 s in the narrow HBM
    assert run(step(product("a", 1000)), WIDE).seconds == approx(1)
    assert run(step(product("a", 1000))).seconds == approx(20.04)


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 1.0), ("f32", 2.0), ("f8e4m3fn", 0.5)])
def test_products_run_at_the_rate_of_their_operands(dtype, seconds):
    assert run(step(product("a", 1000, dtype)), WIDE).seconds == approx(seconds)


def test_a_fusion_reads_the_slice_that_it_needs_and_not_the_stack():
    fused = computation(
        "fused",
        "%f.p = s8[10,100]{1,0} parameter(0)\n%f.i = s32[] parameter(1)\n%f.z = s32[] constant(0)\n"
        "%f.s = s8[1,100]{1,0} dynamic-slice(%f.p, %f.i, %f.z), dynamic_slice_sizes={1,100}\n"
        "ROOT %f.r = s8[100]{0} reshape(%f.s)",
    )
    stack = "%w = s8[10,100]{1,0} parameter(0)\n%i = s32[]{:S(1)} constant(3)"
    text = step(stack, "%a = s8[100]{0} fusion(%w, %i), kind=kLoop, calls=%fused", others=(fused,))
    # 100 bytes read, 100 written, and the 4 of the position
    assert run(text).seconds == approx(2.04)


def test_an_update_in_place_writes_what_it_updates():
    fused = computation(
        "fused",
        "%f.p = s8[10,100]{1,0} parameter(0)\n%f.u = s8[1,100]{1,0} parameter(1)\n%f.z = s32[] constant(0)\n"
        "ROOT %f.r = s8[10,100]{1,0} dynamic-update-slice(%f.p, %f.u, %f.z, %f.z)",
    )
    state = "%w = s8[10,100]{1,0} parameter(0)\n%u = s8[1,100]{1,0} parameter(1)"
    text = step(state, "%a = s8[10,100]{1,0} fusion(%w, %u), kind=kLoop, calls=%fused", others=(fused,))
    assert run(text).seconds == approx(2)


def test_a_call_runs_where_it_stands():
    called = computation("called", f"{kernel('c', 200)}\nROOT %c.r = s8[200]{{0}} copy(%c)")
    # the copy reads 200 and writes 200
    assert run(step(kernel("a", 100), "%b = s8[] call(), to_apply=%called", others=(called,))).seconds == approx(7)


def test_of_a_conditional_the_dearest_branch_is_taken_and_that_is_said():
    cheap, dear = (computation(n, f"ROOT {kernel(n + '.k', size)}") for n, size in (("cheap", 100), ("dear", 300)))
    text = step(
        "%i = s32[] constant(0)\n%b = s8[] conditional(%i, %i, %i), branch_computations={%cheap, %dear}",
        others=(cheap, dear),
    )
    done = run(text)
    assert done.seconds == approx(3)
    assert done.notes == ("of conditionals the dearest branch was taken",)


# --- copies -----------------------------------------------------------------------------------------


def test_a_copy_with_enough_work_beside_it_is_hidden():
    text = step(argument("a", 50), to_host("c", 50), product("p", 8000), on_host("d", 50, "c"))
    made = timeline(text, WIDE)
    assert made.step_time_s == approx(8)  # the copy took 5
    assert exposed(made) == {}
    (copy,) = made.exposed
    assert (copy.kind, copy.num_bytes, copy.time_s, copy.window, copy.window_s, copy.work_s) == (
        "d2h", 50, approx(5), 1.0, approx(8), approx(8),
    )  # fmt: skip


def test_a_copy_wider_than_its_window_is_exposed_for_the_rest():
    text = step(argument("a", 100), to_host("c", 100), product("p", 4000), on_host("d", 100, "c"))
    made = timeline(text, WIDE)
    assert made.step_time_s == approx(10)
    (copy,) = made.exposed
    assert (copy.name, copy.time_s, copy.exposed_s, copy.window) == ("state.a", approx(10), approx(6), approx(0.4))
    assert made.waiting_s == {"d2h": approx(6)}


def test_a_copy_that_ends_where_it_starts_is_exposed_whole():
    made = timeline(step(argument("h", 100, host=True), from_host("c", 100), on_device("d", 100, "c")))
    assert (made.step_time_s, exposed(made)) == (approx(5), {"state.h": approx(5)})
    assert made.exposed[0].window == 0


def test_a_copy_without_start_and_done_stops_the_stream():
    text = step(kernel("a", 100), "%c = s8[100]{0:S(5)} copy(%a)", kernel("b", 100))
    made = timeline(text)
    assert made.step_time_s == approx(12)
    assert made.waiting_s == {"d2h": approx(10)}


def test_the_two_directions_run_side_by_side():
    text = step(
        argument("a", 100), argument("h", 100, 1, host=True), to_host("c", 100), from_host("e", 100),
        on_device("f", 100, "e"), on_host("d", 100, "c"),
    )  # fmt: skip
    made = timeline(text, WIDE)
    assert made.step_time_s == approx(10)
    assert exposed(made) == {"state.h": approx(5), "state.a": approx(5)}


def test_copies_of_one_direction_queue():
    text = step(
        argument("a", 100), argument("b", 100, 1), to_host("c", 100, "a"), to_host("d", 100, "b"), product("p", 12000),
        on_host("e", 100, "c"), on_host("f", 100, "d"),
    )  # fmt: skip
    made = timeline(text, WIDE)
    assert made.step_time_s == approx(20)  # the second from 10 to 20, of which the work covers 2
    assert exposed(made) == {"state.b": approx(8)}


def test_a_wait_is_charged_to_the_copy_that_runs_and_not_to_the_one_that_queues():
    text = step(
        argument("a", 100), argument("b", 50, 1), to_host("c", 100, "a"), to_host("d", 50, "b"),
        on_host("f", 50, "d"), on_host("e", 100, "c"),
    )  # fmt: skip
    assert exposed(timeline(text, WIDE)) == {"state.a": approx(10), "state.b": approx(5)}


# --- contention -------------------------------------------------------------------------------------


def test_a_kernel_gives_way_to_a_copy_in_the_hbm():
    # the copy takes 10 of 100 B/s, the kernel has 90: 180 bytes in 2 s
    text = step(argument("a", 100), to_host("c", 100), kernel("k", 180), on_host("d", 100, "c"))
    done = run(text)
    (work,) = [e for e in done.events if e.kind == "work"]
    assert (work.seconds, work.alone) == (approx(2), approx(1.8))
    assert done.seconds == approx(10)  # the copy is not slowed


def test_a_kernel_is_as_fast_as_ever_once_the_copy_is_over():
    # 5 s at 90 B/s are 450 bytes, the other 450 take 4.5 s
    text = step(argument("a", 50), to_host("c", 50), kernel("k", 900), on_host("d", 50, "c"))
    assert run(text).seconds == approx(9.5)


def test_arithmetic_is_not_slowed_by_copies():
    text = step(argument("a", 100), to_host("c", 100), product("p", 12000), on_host("d", 100, "c"))
    assert run(text, machine(hbm=1e6)).seconds == approx(12)


def test_both_directions_share_the_memory_of_the_cpu():
    # a CPU with 60 B/s for 4 devices: 15 each. Of 10 and 20 B/s wanted both get 7.5: 75 bytes take 10 s
    text = step(
        argument("a", 75), argument("h", 75, 1, host=True), to_host("c", 75), from_host("e", 75), on_device("f", 75, "e"),
        on_host("d", 75, "c"),
    )  # fmt: skip
    assert run(text, machine(hbm=1e9, cpu_memory=60.0)).seconds == approx(10)


def test_one_direction_alone_has_the_memory_of_the_cpu_for_itself():
    text = step(argument("h", 150, host=True), from_host("c", 150), on_device("d", 150, "c"))
    # 15 B/s where the link has 20
    assert run(text, machine(hbm=1e9, cpu_memory=60.0)).seconds == approx(10)


# --- collectives ------------------------------------------------------------------------------------


def test_an_all_gather_passes_all_but_its_own_part_through_the_link():
    # 100 bytes gathered: 75 at 50 B/s, beside 1 s of arithmetic
    text = step(argument("a", 25), all_gather("g", 25, "a"), product("p", 1000), gathered("d", 100, "g"))
    made = timeline(text, WIDE)
    assert made.step_time_s == approx(1.5)
    (collective,) = made.exposed
    assert (collective.name, collective.kind, collective.num_bytes) == ("state.a", "collective", 100)
    assert (collective.exposed_s, collective.lane) == (approx(0.5), "interconnect")


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("%r = s8[100]{0} all-reduce(%a), replica_groups={}, to_apply=%add", 3.0),  # 2 x 75 / 50
        ("%r = s8[25]{0} reduce-scatter(%a), replica_groups={}, dimensions={0}, to_apply=%add", 1.5),
        ("%r = s8[100]{0} all-to-all(%a), replica_groups={}, dimensions={0}", 1.5),
        ("%r = s8[100]{0} collective-permute(%a), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", 2.0),
        ("%r = s8[100]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add", 2.0),  # 2 x 50 / 50
        ("%r = s8[100]{0} all-reduce(%a), replica_groups=[2,2]<=[4], to_apply=%add", 2.0),
    ],
)
def test_collectives_without_start_and_done_stop_the_stream(line, seconds):
    add = computation("add", "%x.a = s8[] parameter(0)\n%x.b = s8[] parameter(1)\nROOT %x.r = s8[] add(%x.a, %x.b)")
    made = timeline(step(argument("a", 100), line, others=(add,)), WIDE)
    assert made.step_time_s == approx(seconds)
    assert made.waiting_s == {"collective": approx(seconds)}


def test_a_ring_over_two_domains_is_bound_by_the_ports_of_a_domain():
    # 8 devices, 4 in a domain: 4 ports of 10 B/s against links of 50. 160 bytes gathered: 140 / 40
    text = step(argument("a", 20), all_gather("g", 20, "a", 8), gathered("d", 160, "g"), devices=8)
    made = timeline(text, WIDE)
    assert made.step_time_s == approx(3.5)
    assert made.lanes["network"] == approx(3.5)


def test_groups_with_one_device_of_each_domain_have_one_port():
    groups = "{{0,4},{1,5},{2,6},{3,7}}"
    text = step(argument("a", 20), all_gather("g", 20, "a", 2, groups), gathered("d", 40, "g"), devices=8)
    assert run(text, WIDE).seconds == approx(2)  # 20 bytes at 10 B/s


def test_an_all_to_all_sends_most_of_its_bytes_through_its_own_port():
    # 8 parts of 10 bytes: 4 leave the domain at 10 B/s, while 3 stay in it
    line = "%r = s8[80]{0} all-to-all(%a), replica_groups={}, dimensions={0}"
    assert run(step(argument("a", 80), line, devices=8), WIDE).seconds == approx(4)


def test_collectives_of_one_network_queue_and_of_two_do_not():
    near = "{{0,1,2,3},{4,5,6,7}}"
    start = [argument("a", 25), all_gather("g", 25, "a", 4, near)]  # 1.5 s
    end = [gathered("d", 100, "g"), gathered("e", 100, "f")]
    text = step(*start, all_gather("f", 25, "a", 4, near), *end, devices=8)
    assert run(text, WIDE).seconds == approx(3)
    far = "{{0,4},{1,5},{2,6},{3,7}}"
    text = step(*start, all_gather("f", 25, "a", 2, far), *end, devices=8)
    assert run(text, WIDE).seconds == approx(2.5)  # 25 bytes at 10 B/s, the other within them


def test_a_collective_wrapped_in_an_asynchronous_computation():
    wrapped = computation(
        "wrapped", "%w.a = s8[100]{0} parameter(0)\nROOT %w.r = s8[25]{0} reduce-scatter(%w.a), replica_groups={}"
    )
    text = step(
        argument("a", 100), "%s = ((s8[100]{0}), s8[25]{0}) async-start(%a), calls=%wrapped", product("p", 1000),
        "%d = s8[25]{0} async-done(%s)", others=(wrapped,),
    )  # fmt: skip
    made = timeline(text, WIDE)
    assert (made.step_time_s, made.waiting_s) == (approx(1.5), {"collective": approx(0.5)})


def test_a_collective_that_the_compiler_made_synchronous_is_not_overlapped():
    start = all_gather("g", 25, "a") + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    text = step(argument("a", 25), start, product("p", 1000), gathered("d", 100, "g"))
    assert run(text, WIDE).seconds == approx(2.5)


# --- loops ------------------------------------------------------------------------------------------


def test_a_loop_is_run_in_short_and_counts_in_full():
    text = step(START, loop("w", "body", 126), others=(CONDITION, repeated("body", kernel("k", 100))))
    done = run(text)
    assert done.seconds == approx(126)
    work = [e for e in done.events if e.kind == "work"]
    assert len(work) == 3  # the first, the steady and the last
    assert sum(e.count for e in work) == 126
    assert [(s.iterations, s.loop) for s in done.skipped] == [(123, "w")]


def test_loops_in_loops():
    inner = repeated("inner", kernel("k", 100))
    outer = repeated("outer", kernel("a", 200), "%init = (s32[]) tuple(%outer.i)", loop("v", "inner", 7))
    text = step(START, loop("w", "outer", 50), others=(CONDITION, inner, outer))
    done = run(text)
    assert done.seconds == approx(50 * (2 + 7))
    assert sum(e.count for e in done.events if e.op.instruction == "k") == approx(350)
    assert sum(e.count for e in done.events if e.op.instruction == "a") == approx(50)


@pytest.mark.parametrize("trips", [0, 1, 2, 3])
def test_short_loops(trips):
    text = step(START, loop("w", "body", trips), others=(CONDITION, repeated("body", kernel("k", 100))))
    assert run(text).seconds == approx(trips)


def test_a_trip_count_that_only_the_condition_tells():
    counted = computation(
        "condition",
        "%c.p = (s32[]) parameter(0)\n%c.i = s32[] get-tuple-element(%c.p), index=0\n%c.n = s32[] constant(12)\n"
        "ROOT %c.r = pred[] compare(%c.i, %c.n), direction=LT",
    )
    body = computation(
        "body",
        f"%b.p = (s32[]) parameter(0)\n%b.i = s32[] get-tuple-element(%b.p), index=0\n{kernel('k', 100)}\n"
        "%b.one = s32[]{:S(1)} constant(3)\n%b.n = s32[]{:S(1)} add(%b.i, %b.one)\nROOT %b.r = (s32[]) tuple(%b.n)",
    )
    done = run(step(START, loop("w", "body", None), others=(counted, body)))
    # 0, 3, 6, 9: four iterations of the kernel and of an addition of 12 bytes
    assert done.seconds == approx(4 * (1 + 0.12))
    assert done.notes == ()


def test_a_trip_count_that_nothing_tells_is_assumed_and_can_be_set():
    text = step(START, loop("w", "body", None), others=(CONDITION, repeated("body", kernel("k", 100))))
    done = run(text)
    assert done.seconds == approx(1)
    assert done.notes == ("the loop w does not say how often it runs: 1 was assumed, set it with --trip-count",)
    assert run(text, trip_counts={"": 5}).seconds == approx(5)
    assert run(text, trip_counts={"w": 6, "": 5}).seconds == approx(6)
    assert run(text, trip_counts={"v": 6}).seconds == approx(1)


def pipelined(copy_bytes: int, work_flops: int, trips: int) -> str:
    """A loop that starts a copy to the host in one iteration and ends it in the next; the first is started before
    it, the last ended after it."""
    token = f"(s8[{copy_bytes}]{{0:S(5)}}, s8[{copy_bytes}]{{0}}, u32[])"
    body = computation(
        "body",
        f"%b.p = (s32[], {token}) parameter(0)\n%b.i = s32[] get-tuple-element(%b.p), index=0\n"
        f"%b.t = {token} get-tuple-element(%b.p), index=1\n{product('p', work_flops)}\n"
        f"{on_host('b.d', copy_bytes, 'b.t')}\n{argument('v', copy_bytes, 1).replace('parameter', 'constant')}\n"
        f"{to_host('b.s', copy_bytes, 'v')}\nROOT %b.r = (s32[], {token}) tuple(%b.i, %b.s)",
    )
    return step(
        argument("a", copy_bytes), to_host("c", copy_bytes), "%zero = s32[] constant(0)",
        f"%init = (s32[], {token}) tuple(%zero, %c)", loop("w", "body", trips, shape=f"(s32[], {token})"),
        f"%t = {token} get-tuple-element(%w), index=1", on_host("d", copy_bytes, "t"), others=(CONDITION, body),
    )  # fmt: skip


def test_a_copy_that_ends_in_the_next_iteration_is_hidden_behind_it():
    made = timeline(pipelined(30, 4000, 10), WIDE)
    # ten iterations of 4 s, in each of which a copy of 3 s ends; the last copy has nothing beside it
    assert made.step_time_s == approx(43)
    assert made.waiting_s == {"d2h": approx(3)}
    assert sum(e.count for e in made.exposed) == approx(11)
    assert sum(e.time_s for e in made.exposed) == approx(33)


def test_a_copy_longer_than_an_iteration_sets_its_pace():
    made = timeline(pipelined(60, 4000, 40), WIDE)
    # the copy of 6 s is the iteration: 40 x 6 and the last copy
    assert made.step_time_s == approx(246)
    assert made.waiting_s == {"d2h": approx(40 * 2 + 6)}
    assert made.compute_s["forward"] == approx(160)


def test_what_was_started_before_a_loop_slows_it_while_it_lasts():
    # a copy from the host of 5 s takes 20 of 100 B/s: four iterations of 1.25 s, then six of 1 s
    text = step(
        argument("h", 100, host=True), from_host("c", 100), START, loop("w", "body", 10), on_device("d", 100, "c"),
        others=(CONDITION, repeated("body", kernel("k", 100))),
    )  # fmt: skip
    done = run(text)
    assert done.seconds == approx(11)
    assert sum(e.count for e in done.events if e.kind == "work") == 10
    assert sum(e.count * e.seconds for e in done.events if e.kind == "work") == approx(11)


def test_a_long_copy_beside_a_long_loop():
    # 500 s of copy are 400 iterations of 1.25 s; the other 600 take 1 s each
    text = step(
        argument("h", 10000, host=True), from_host("c", 10000), START, loop("w", "body", 1000), on_device("d", 10000, "c"),
        others=(CONDITION, repeated("body", kernel("k", 100))),
    )  # fmt: skip
    done = run(text)
    assert done.seconds == approx(500 + 600)
    assert len(done.events) < 30
    (window,) = [e for e in done.events if e.kind == "window"]
    assert (window.seconds, window.alone) == (approx(1100), approx(1100))


def test_a_collective_in_every_iteration_of_a_loop():
    # 1.5 s of all-gather beside 1 s of arithmetic, twenty times
    body = repeated("body", argument("a", 25, 1), all_gather("g", 25, "a"), product("p", 1000), gathered("d", 100, "g"))
    made = timeline(step(START, loop("w", "body", 20), others=(CONDITION, body)), WIDE)
    assert made.step_time_s == approx(30)
    assert made.waiting_s == {"collective": approx(10)}
    (collective,) = made.exposed
    assert (collective.count, collective.time_s, collective.window) == (approx(20), approx(30), approx(2 / 3))


# --- what it adds up to -----------------------------------------------------------------------------


def test_work_and_waits_are_the_step():
    for text in (pipelined(60, 4000, 40), pipelined(30, 4000, 7)):
        made = timeline(text, WIDE)
        assert sum(made.compute_s.values()) + made.exposed_s == approx(made.step_time_s)


def test_parts_of_the_step_are_read_from_scopes():
    scopes = {
        "a": ("jit(step)/jvp()/layer:layers/mul", 100),
        "b": ("jit(step)/transpose(jvp())/layer:layers/mul", 200),
        "c": ("jit(step)/transpose(jvp())/layer:layers/checkpoint/rematted_computation/mul", 300),
        "d": ("jit(step)/optimizer/mul", 400),
        "e.remat2": ("jit(step)/jvp()/layer:layers/mul", 500),
        "f": ("jit(step)/add", 600),
    }
    made = timeline(step(*(kernel(name, size, scope) for name, (scope, size) in scopes.items())))
    assert made.compute_s == {
        "forward": approx(1), "backward": approx(2), "recompute": approx(3), "optimizer": approx(10),
        "compiler_remat": approx(5),
    }  # fmt: skip


def test_what_is_computed_again_is_not_the_models_work():
    again = "jit(step)/transpose(jvp())/checkpoint/rematted_computation/dot"
    text = step(product("a", 1000, op_name="jit(step)/jvp()/dot"), product("b", 3000, op_name=again))
    made = timeline(text, WIDE)
    assert (made.hardware_flops, made.model_flops) == (4000, 1000)
    assert made.mfu == approx(0.25)  # 1000 of the 4000 FLOPs that 4 s can be


def test_unknown_operations_are_costed_by_their_bytes_and_named():
    text = step(argument("a", 100), "%b = s8[100]{0} frobnicate(%a)", kernel("k", 200), '%c = s8[100]{0} custom-call(%b), '
                'custom_call_target="their_kernel"')  # fmt: skip
    made = timeline(text)
    assert made.step_time_s == approx(6)  # read and write 100 bytes, twice, and write 200
    assert sorted((u["opcode"], u["count"], u["time_s"]) for u in made.unknown) == [
        ("custom-call their_kernel", 1, approx(2)), ("frobnicate", 1, approx(2)),
    ]  # fmt: skip
    assert made.unknown_share == approx(4 / 6)


def test_a_ragged_product_has_every_row_once():
    operands = (
        "%l = bf16[10,20]{1,0} parameter(0)\n%r = bf16[5,20,3]{2,1,0} parameter(1)\n%s = s32[5]{0} parameter(2)\n"
    )
    line = "%d = bf16[10,3]{1,0} ragged-dot(%l, %r, %s), lhs_contracting_dims={1}, lhs_ragged_dims={0}"
    assert timeline(step(operands, line), WIDE).hardware_flops == 2 * 10 * 20 * 3


def test_names_of_copies_are_those_of_their_tensors():
    scope = "jit(step)/jvp()/while/body/save:layers:mlpwi_0/dynamic_update_slice"
    made = timeline(step(kernel("a", 100), to_host("c", 100, scope=scope), on_host("d", 100, "c")))
    assert [e.name for e in made.exposed] == ["mlpwi_0"]
    assert metadata("") == ""


# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op_name", "short"),
    [
        ("jit(step)/while/body/layer:layers/checkpoint/reduce_scatter", "checkpoint/reduce_scatter"),
        ("jit(step)/jvp()/while", "jit(step)/jvp()"),
        ("jit(step)/(transpose(jvp())/reduce_sum:optimizer/reduce_sum:logits/psum)", "transpose(jvp())/reduce_sum and others"),
        ("jit(step)/a/(transpose(jvp(layer:layers))/x/dot_general:b/transpose)", "x/dot_general and others"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_name_is_the_end_of_where_it_comes_from(op_name, short):
    assert short_name(op_name) == short
