//! The scenario of controlling a running guest.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::donor::Donor;
use super::guest::{BOOT_DEADLINE, Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::RemoteProcess;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "control",
    about: "a guest is asked by a crowd, paused, resumed, made to give up memory, takes some back in need and is given the rest, and shut down by its power button",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: control,
}];

/// Prints ticks while a probe moves memory. First disables the guest's own reports of free memory,
/// since no block of the configured order exists, so that the counters show the balloon alone.
/// Leaves free memory with data in it, local and on the donor, and keeps some data to be verified.
/// Waits until free memory has shrunk, then lets a program use [`MISSING_BYTES`] more than is free,
/// where the kernel would otherwise kill a process. Waits until free memory has grown again, and
/// uses it. Then waits for the power button and exits.
const WORK: &str = "(i=0; while :; do i=$((i+1)); echo tick=$i.; usleep 100000; done) & \
    echo 11 >/sys/module/page_reporting/parameters/page_reporting_order; \
    faultprobe --bytes 128M; \
    fill() { head -c $2 /dev/urandom | tee /tmp/$1 | md5sum >/tmp/$1.sum; }; \
    same() { md5sum </tmp/$1 | cmp - /tmp/$1.sum && echo $1=$((1)); }; \
    free() { grep MemFree /proc/meminfo | tr -dc 0-9; }; \
    for i in $(seq 16); do cp /bin/busybox /tmp/gone$i; done; fill kept 8388608; rm /tmp/gone*; all=$(free); echo filled=$((1)); \
    until [ $(free) -lt $((all - 350000)) ]; do usleep 100000; done; echo shrunk=$((1)); \
    dd if=/dev/zero of=/dev/null bs=$(($(free) + 8192))K count=1 && echo needed=$((1)); \
    until [ $(free) -ge $((all - 30000)) ]; do usleep 100000; done; echo grown=$((1)); \
    fill again 8388608; same again; same kept; \
    exec 3</dev/input/event0; echo button-ready=$((1)); \
    echo button-bytes=$(head -c 24 <&3 | wc -c)";

/// Size of the balloon, of 512 MiB of guest memory.
const BALLOON_BYTES: u64 = 400 << 20;
/// How far a program in the guest exceeds the free memory at once while the balloon is inflated.
const MISSING_BYTES: u64 = 8 << 20;
/// The guest does not clear pages that it gives to the balloon.
const ALLOCATES_AS_IT_IS: &str = " init_on_alloc=0";
/// Deadline for resizing the balloon; some seconds under emulation.
const BALLOON_DEADLINE: Duration = Duration::from_secs(90);

/// Gives the clients a local copy of the program: from the share each of them would load it again.
const GATHER: &str = "mkdir -p /tmp/crowd; cp /share/ssi-hv /tmp/crowd/client";
/// Ten clients at once, since emulated hosts are slow (vmm/tests/integration/control.rs has fifty).
/// Prints how many saw the guest running.
const CROWD: &str = "cd /tmp/crowd; for i in $(seq 10); do ./client status ctl --json >$i.json & done; wait; \
    grep -l '\"state\": \"running\"' *.json | wc -l; rm -r /tmp/crowd";

/// Duration of the pause; the guest ticks every 0.1 s.
const PAUSE: &[&str] = &["sleep", "1"];

fn control(context: &Context<'_>) -> Result {
    let here = context.testbed.host(1);
    here.check(&["sh", "-c", GATHER], SHORT)?;
    let donor = Donor::start(context)?;
    let mut guest = Guest {
        local_memory: Some("192M"),
        ..Guest::remote(2, WORK)
    };
    guest.cmdline.push_str(" ssi_modules=\"button evdev\"");
    guest.cmdline.push_str(ALLOCATES_AS_IT_IS);
    guest.more.extend(["--name", "ctl"]);
    let process = guest.boot(context)?;
    process.wait_for_line("tick=5.", BOOT_DEADLINE)?;

    let deaf = here.run(&["ssi-hv", "pause", "nobody"], SHORT)?;
    ensure!(
        deaf.status.code == exit::HOST_ERROR && deaf.stderr.contains("does not run here"),
        "{deaf:?}"
    );
    let saw = here.check(&["sh", "-c", CROWD], SHORT)?;
    ensure!(saw.trim() == "10", "{} of 10 saw it run", saw.trim());

    let asked = Instant::now();
    here.check(&["ssi-hv", "pause", "ctl"], SHORT)?;
    let took = asked.elapsed();
    let status = || status(here, &["ctl"]);
    let paused = status()?;
    ensure!(paused["vms"][0]["state"] == "paused", "{paused}");
    // Output from before the pause can still be in transit.
    here.check(PAUSE, SHORT)?;
    let said = process.stdout();
    here.check(PAUSE, SHORT)?;
    ensure!(
        process.stdout() == said,
        "its console continues: {}",
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
    here.check(&["ssi-hv", "resume", "ctl"], SHORT)?;
    process.wait_for_line(&format!("tick={}.", ticks + 5), SHORT)?;

    process.wait_for_line("filled=1", GUEST_DEADLINE)?;
    let dropped = balloon(context, &process, &format!("vm-{}-ctl", process.pid()))?;
    context.note(dropped);
    process.wait_for_line("button-ready=1", GUEST_DEADLINE)?;
    for file in ["again=1", "kept=1"] {
        ensure!(process.stdout().contains(file), "no {file}: it has changed");
    }
    let message = here.check(&["ssi-hv", "shutdown", "ctl", "--wait", "55"], SHORT)?;
    ensure!(message.trim() == "ctl: ended", "{message}");
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(128 << 20)?;
    ensure!(
        guest.output.stdout.contains("button-bytes=24"),
        "the guest did not hear of its button"
    );
    let dropped = donor.end(context)?["pages_dropped"].as_f64();
    ensure!(
        dropped == Some(guest.number("/free_pages/dropped_at_home")?),
        "the donor has dropped {dropped:?} pages: {}",
        guest.report["free_pages"]
    );
    context.note(format!("pausing took {} ms, emulated", took.as_millis()));
    Ok(Verdict::Pass)
}

/// Inflates and deflates the guest's balloon; returns a summary.
fn balloon(context: &Context<'_>, guest: &RemoteProcess, socket: &str) -> anyhow::Result<String> {
    let counters = || -> anyhow::Result<Value> {
        Ok(ask(context, socket, "GET", "/v1/report", "")?["free_pages"].take())
    };
    let before = counters()?;
    resize(context, socket, BALLOON_BYTES)?;
    let after = counters()?;
    let grown = |name: &str| Ok::<_, anyhow::Error>(number(&after, name)? - number(&before, name)?);
    let (pages, reported) = (BALLOON_BYTES / 4096, grown("/reported")?);
    ensure!(
        reported == pages,
        "{reported} pages were given up, {pages} were asked for"
    );
    let (here, home) = (grown("/dropped_here")?, grown("/dropped_at_home")?);
    // Far more free pages than these had contents; those that did not fit the local memory were on
    // the donor.
    ensure!(
        here > 2000 && home > 2000,
        "next to nothing was dropped: {after}"
    );
    guest.wait_for_line("shrunk=1", SHORT)?;
    let taken = taken_back(context, guest, socket)?;
    resize(context, socket, 0)?;
    guest.wait_for_line("grown=1", SHORT)?;
    Ok(format!(
        "a balloon of {pages} pages dropped {here} here and {home} at the donor; in need the guest took {} MiB of it back",
        taken >> 20
    ))
}

/// Waits until a program of the guest has used more memory than the balloon left free, and returns
/// how much the guest took back from the balloon by itself.
fn taken_back(context: &Context<'_>, guest: &RemoteProcess, socket: &str) -> anyhow::Result<u64> {
    guest.wait_for_line("needed=1", GUEST_DEADLINE)?;
    let now = ask(context, socket, "GET", "/v1/balloon", "")?;
    ensure!(number(&now, "/target_bytes")? == BALLOON_BYTES, "{now}");
    let taken = BALLOON_BYTES.saturating_sub(number(&now, "/actual_bytes")?);
    ensure!(
        taken >= MISSING_BYTES,
        "a program needed {MISSING_BYTES} bytes more than were free; the balloon gave {taken}"
    );
    Ok(taken)
}

/// Requests a balloon size and waits until the guest has reached it.
pub(super) fn resize(context: &Context<'_>, socket: &str, bytes: u64) -> anyhow::Result<()> {
    let deadline = Instant::now() + BALLOON_DEADLINE;
    let body = format!("{{\"target_bytes\": {bytes}}}");
    let mut now = ask(context, socket, "PUT", "/v1/balloon", &body)?;
    ensure!(number(&now, "/target_bytes")? == bytes, "{now}");
    while number(&now, "/actual_bytes")? != bytes {
        ensure!(
            Instant::now() < deadline,
            "{bytes} bytes were asked for: {now}"
        );
        now = ask(context, socket, "GET", "/v1/balloon", "")?;
    }
    Ok(())
}

/// Sends a request to a control socket on host 1, as a program would, and returns the answer.
pub(super) fn ask(
    context: &Context<'_>,
    socket: &str,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Value> {
    let script = "printf '%s %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s' \"$2\" \"$3\" ${#4} \"$4\" | \
        /share/socket-pipe unix-connect /run/ssi-hv/$1.sock";
    let argv = ["sh", "-c", script, "sh", socket, method, path, body];
    let said = context.testbed.host(1).check(&argv, SHORT)?;
    let (head, answer) = said.split_once("\r\n\r\n").unwrap_or((said.as_str(), ""));
    ensure!(head.starts_with("HTTP/1.1 200 "), "{method} {path}: {said}");
    serde_json::from_str(answer).with_context(|| format!("{method} {path}: {said}"))
}

/// Returns the number of the last tick on the console.
fn last_tick(console: &str) -> anyhow::Result<u64> {
    let ticks = console.split("tick=").filter_map(|rest| {
        let (number, _) = rest.split_once('.')?;
        number.parse().ok()
    });
    ticks.max().context("no tick")
}
