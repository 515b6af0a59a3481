//! What is done often: guests in a row, and moves of a CPU that works.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{CLOUD, DEADLINE, QUIET, SUM, TWO, end, has_summed, said};
use crate::e2e::guest::{Finished, SHORT, exit, reach_end};
use crate::e2e::{Context, Result, Verdict};
use crate::moves;

/// Guests in a row.
const BOOTS: usize = 20;

pub(super) fn twenty_boots(context: &Context<'_>) -> Result {
    let nodes = TWO.nodes(context)?;
    let mut times = Vec::new();
    for boot in 1..=BOOTS {
        let started = Instant::now();
        let process = TWO.guest(CLOUD, SUM).start(context)?;
        let ended = reach_end(context, &process, DEADLINE);
        let checked = ended.and_then(|output| {
            let guest = Finished::read(context, output)?;
            has_summed(&guest)?;
            guest.number("/boot/to_init_ms")
        });
        let to_init = checked.with_context(|| {
            let said = said(&process, &nodes);
            format!("boot {boot} of {BOOTS}, after those of {times:.0?} s; {said}")
        })?;
        context.note(format!(
            "boot {boot}: init after {:.0} s, end after {:.0} s (emulated)",
            to_init / 1e3,
            started.elapsed().as_secs_f64()
        ));
        times.push(started.elapsed().as_secs_f64());
    }
    end(context, nodes)?;
    Ok(Verdict::Pass)
}

/// How long a CPU goes to and fro, and how often, at least.
pub(super) struct Often {
    time: Duration,
    moves_min: usize,
}

/// An order alone takes a second on an emulated host that has to wait for its CPU.
pub(super) const MINUTES: Often = Often {
    time: Duration::from_secs(300),
    moves_min: 30,
};
/// On hosts with nothing else to do an order takes 0.7 s.
pub(super) const THOUSAND: Often = Often {
    time: Duration::from_secs(1500),
    moves_min: 1000,
};
/// Name of the guest whose CPU moves.
const NAME: &str = "moves";

pub(super) fn moves(context: &Context<'_>, often: &Often) -> Result {
    let nodes = TWO.nodes(context)?;
    let seconds = often.time.as_secs();
    let exec = format!("{QUIET}; echo probe runs; faultprobe --ssi --seconds {seconds}");
    let mut guest = TWO.guest(CLOUD, &exec);
    guest.more.extend(["--name", NAME]);
    let process = guest.start(context)?;
    process
        .wait_for_line("probe runs", DEADLINE)
        .with_context(|| said(&process, &nodes))?;
    let (started, mut moves, mut late) = (Instant::now(), 0, 0);
    for node in ["0", "1"].into_iter().cycle() {
        match moves::order(context.testbed.host(1), NAME, node) {
            Ok(true) => moves += 1,
            Ok(false) => late += 1,
            // The guest has ended meanwhile, and the probe is looked at.
            Err(_) if process.wait(SHORT).is_ok() => break,
            Err(error) => return Err(error),
        }
        if started.elapsed() >= often.time {
            break;
        }
    }
    let time = started.elapsed().as_secs_f64();
    let output = reach_end(context, &process, DEADLINE);
    let output = output.with_context(|| said(&process, &nodes))?;
    let guest = Finished::read(context, output)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let probe = guest.faultprobe_over(1 << 16)?;
    ensure!(probe["violations"] == 0, "violations: {probe}");
    ensure!(
        moves >= often.moves_min,
        "{moves} moves in {time:.0} s, and {late} were late"
    );
    end(context, nodes)?;
    context.note(format!(
        "{moves} moves in {time:.0} s, {late} orders that were late (emulated)"
    ));
    Ok(Verdict::Pass)
}
