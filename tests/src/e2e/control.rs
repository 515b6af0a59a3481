//! The scenario of telling a guest what to do while it runs.

use std::time::Instant;

use anyhow::{Context as _, ensure};

use super::guest::{
    BOOT_DEADLINE, Donor, Finished, GUEST_DEADLINE, Guest, INIT_REACHED, SHORT, exit,
};
use super::status::{json, number};
use super::{Context, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "control",
    about: "a guest is asked by a crowd, paused, resumed, and shut down by its power button",
    needs_product: true,
    run: control,
}];

/// Ticks while a probe has memory on the move; then listens to the power button, and ends when that
/// was pressed.
const WORK: &str = "(i=0; while :; do i=$((i+1)); echo tick=$i.; usleep 100000; done) & \
    faultprobe --bytes 128M; \
    exec 3</dev/input/event0; echo button-ready=$((1)); \
    echo button-bytes=$(head -c 24 <&3 | wc -c)";

/// Ten clients at once, since emulated hosts are slow (vmm/tests/control.rs has fifty); prints how
/// many saw the guest run. The program is copied first: from the
/// share each of them would load it anew.
const CROWD: &str = "mkdir -p /tmp/crowd; cd /tmp/crowd; cp /share/ssi-hv client; \
    for i in $(seq 10); do ./client status told --json >$i.json & done; wait; \
    grep -l '\"state\": \"running\"' *.json | wc -l; rm -r /tmp/crowd";

/// How long the guest is paused: its ticks come every 0.1 s.
const PAUSE: &[&str] = &["sleep", "1"];

fn control(context: &Context<'_>) -> Result {
    let here = context.testbed.host(1);
    let donor = Donor::start(context)?;
    let mut guest = Guest {
        local_memory: Some("192M"),
        ..Guest::remote(2, WORK)
    };
    guest.cmdline.push_str(" ssi_modules=\"button evdev\"");
    guest.more.extend(["--name", "told"]);
    let process = guest.start(context)?;
    process.wait_for_line(INIT_REACHED, BOOT_DEADLINE)?;
    process.wait_for_line("tick=5.", BOOT_DEADLINE)?;

    let deaf = here.run(&["ssi-hv", "pause", "nobody"], SHORT)?;
    ensure!(
        deaf.status.code == exit::HOST_ERROR && deaf.stderr.contains("does not run here"),
        "{deaf:?}"
    );
    let saw = here.check(&["sh", "-c", CROWD], SHORT)?;
    ensure!(saw.trim() == "10", "{} of 10 saw it run", saw.trim());

    let asked = Instant::now();
    here.check(&["ssi-hv", "pause", "told"], SHORT)?;
    let took = asked.elapsed();
    let status = || json(here, &["ssi-hv", "status", "told", "--json"]);
    let paused = status()?;
    ensure!(paused["vms"][0]["state"] == "paused", "{paused}");
    // What it said before is on its way here for a moment.
    here.check(PAUSE, SHORT)?;
    let said = process.stdout();
    here.check(PAUSE, SHORT)?;
    ensure!(
        process.stdout() == said,
        "its console goes on: {}",
        process.stdout()
    );
    let still = status()?;
    for kind in ["remote", "zero", "minor", "write_protect"] {
        let pointer = format!("/vms/0/faults/{kind}/count");
        ensure!(
            number(&still, &pointer)? == number(&paused, &pointer)?,
            "{kind} faults while paused: {still}"
        );
    }
    let ticks = last_tick(&said)?;
    here.check(&["ssi-hv", "resume", "told"], SHORT)?;
    process.wait_for_line(&format!("tick={}.", ticks + 5), SHORT)?;

    process.wait_for_line("button-ready=1", GUEST_DEADLINE)?;
    let told = here.check(&["ssi-hv", "shutdown", "told", "--wait", "25"], SHORT)?;
    ensure!(told.trim() == "told: ended", "{told}");
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(128 << 20)?;
    ensure!(
        guest.output.stdout.contains("button-bytes=24"),
        "the guest did not hear of its button"
    );
    donor.stop(context)?;
    context.note(format!("pausing took {} ms, emulated", took.as_millis()));
    Ok(Verdict::Pass)
}

/// The number of the last tick on the console.
fn last_tick(console: &str) -> anyhow::Result<u64> {
    let ticks = console.split("tick=").filter_map(|rest| {
        let (number, _) = rest.split_once('.')?;
        number.parse().ok()
    });
    ticks.max().context("no tick")
}
