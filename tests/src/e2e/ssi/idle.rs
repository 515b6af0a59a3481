//! What a CPU that has nothing to do costs the others, from another host.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{CLOUD, DEADLINE, QUIET, TWO, end, said};
use crate::e2e::guest::{Finished, SHORT, exit};
use crate::e2e::status::{number, status};
use crate::e2e::{Context, Result, Verdict};
use crate::moves;
use crate::testbed::RemoteProcess;

/// Name of the guest.
const NAME: &str = "idle";
/// Pieces of work whose times are compared.
const PIECES: usize = 15;
/// CPU 0 works, by what the shell itself can do, in pieces of the same length, and says how many
/// hundredths of a second each took by the guest's clock. CPU 1 idles.
const WORK: &str = "exec taskset -c 0 sh -c 'now() { read u x < /proc/uptime; n=${u%.*}${u#*.}; }; \
    while :; do now; a=$n; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; now; \
    echo piece $((n-a)) of CPU 0; done'";
const PIECE: &str = "of CPU 0";
/// Deadline of the pieces.
const WITHIN: Duration = Duration::from_secs(600);

/// What pieces took, and what the node with CPU 1 did meanwhile.
struct Pieces {
    /// In hundredths of a second, sorted.
    times: Vec<u64>,
    seconds: f64,
    pages: u64,
}

impl Pieces {
    fn median(&self) -> u64 {
        self.times[self.times.len() / 2]
    }
}

pub(super) fn costs(context: &Context<'_>) -> Result {
    let nodes = TWO.nodes(context)?;
    let mut guest = TWO.guest(CLOUD, &format!("{QUIET}; {WORK}"));
    guest.more.extend(["--name", NAME]);
    let process = guest.start(context)?;
    let measured = (|| {
        process.wait_for_line(PIECE, DEADLINE)?;
        // The pieces while CPU 1 goes to the other host and becomes idle there count for nothing.
        pieces(context, &process)?;
        let apart = pieces(context, &process)?;
        goes(context, "0")?;
        pieces(context, &process)?;
        let together = pieces(context, &process)?;
        goes(context, "1")?;
        pieces(context, &process)?;
        let again = pieces(context, &process)?;
        anyhow::Ok([apart, together, again])
    })();
    let [apart, together, again] = measured.with_context(|| said(&process, &nodes))?;
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    end(context, nodes)?;
    for (name, pieces) in [
        ("idle there", apart),
        ("idle here", together),
        ("idle there again", again),
    ] {
        context.note(format!(
            "CPU 1 {name}: a piece takes {} ms ({} to {}); {:.1} pages a second to its host (emulated)",
            pieces.median() * 10,
            pieces.times[0] * 10,
            pieces.times[PIECES - 1] * 10,
            pieces.pages as f64 / pieces.seconds,
        ));
    }
    Ok(Verdict::Pass)
}

/// Waits for the next pieces.
fn pieces(context: &Context<'_>, process: &RemoteProcess) -> anyhow::Result<Pieces> {
    let before = process.stdout().matches(PIECE).count();
    let (started, pages) = (Instant::now(), pages(context)?);
    // The first is under way.
    process.wait_for_nth_line(PIECE, before + PIECES, WITHIN)?;
    let console = process.stdout();
    let mut times = times(&console)?.split_off(before + 1);
    times.truncate(PIECES);
    times.sort_unstable();
    ensure!(times.len() == PIECES, "{} pieces", times.len());
    Ok(Pieces {
        times,
        seconds: started.elapsed().as_secs_f64(),
        pages: self::pages(context)? - pages,
    })
}

/// What all pieces on the console took.
fn times(console: &str) -> anyhow::Result<Vec<u64>> {
    let lines = console.lines().filter_map(|line| {
        let (before, _) = line.split_once(PIECE)?;
        Some(before.trim().rsplit(' ').next().unwrap_or_default())
    });
    lines
        .map(|time| time.parse().with_context(|| format!("a time: {time:?}")))
        .collect()
}

/// Pages that the second host has received.
fn pages(context: &Context<'_>) -> anyhow::Result<u64> {
    let status = status(context.testbed.host(1), &[NAME])?;
    number(&status, "/vms/0/nodes/1/transfers/pages_received")
}

/// Has CPU 1 go to a node.
fn goes(context: &Context<'_>, node: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + WITHIN;
    while !moves::order(context.testbed.host(1), NAME, node)? {
        ensure!(Instant::now() < deadline, "CPU 1 is not on node {node}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::times;

    #[test]
    fn what_pieces_took_is_found_on_the_console() {
        let console = "x\r\npiece 21 of CPU 0\r\npiece 105 of CPU 0\r\n";
        assert_eq!(times(console).unwrap(), [21, 105]);
        assert!(times("piece x of CPU 0").is_err());
    }
}
