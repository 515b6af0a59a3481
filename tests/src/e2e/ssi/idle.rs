//! What a CPU that has nothing to do costs the others, from another host.

use std::collections::BTreeMap;
use std::fmt;
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
const PIECES: usize = 9;
/// CPU 0 works, by what the shell itself can do, in pieces of the same length, and says how many
/// hundredths of a second each took by the guest's clock. CPU 1 idles.
const WORK: &str = "exec taskset -c 0 sh -c 'now() { read u x < /proc/uptime; n=${u%.*}${u#*.}; }; \
    while :; do now; a=$n; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; now; \
    echo piece $((n-a)) of CPU 0; done'";
const PIECE: &str = "of CPU 0";
/// Deadline of the pieces.
const WITHIN: Duration = Duration::from_secs(600);

/// Parameters of the guest's kernel that are compared, each with flags of the VM: those that leave out
/// the default ones for CPUs on other hosts, none, those that keep programs from CPU 1 as well, and CPUs
/// of other hosts that the kernel knows to be far.
const COMPARED: [(&str, &[&str]); 4] = [
    ("isolcpus=", &[]),
    ("", &[]),
    (
        "isolcpus=nohz,domain,managed_irq,1 rcu_nocbs=1 irqaffinity=0",
        &[],
    ),
    ("isolcpus= irqaffinity=0", &["--numa", "expose"]),
];

/// What pieces took, and what the node with CPU 1 did meanwhile.
struct Pieces {
    /// In hundredths of a second, sorted.
    times: Vec<u64>,
    seconds: f64,
    pages: u64,
}

impl fmt::Display for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a piece takes {} ms ({} to {}), {:.1} pages a second",
            self.times[PIECES / 2] * 10,
            self.times[0] * 10,
            self.times[PIECES - 1] * 10,
            self.pages as f64 / self.seconds,
        )
    }
}

/// How often hosts took each of the hottest pages from each other, by its address.
type Hottest = BTreeMap<u64, u64>;

fn hottest(context: &Context<'_>) -> anyhow::Result<Hottest> {
    let status = status(context.testbed.host(1), &[NAME])?;
    let pages = status["vms"][0]["coherence"]["hottest"].as_array();
    let pages = pages.context("no hottest pages")?.iter();
    pages
        .map(|page| Ok((number(page, "/address")?, number(page, "/transfers")?)))
        .collect()
}

/// The pages that were taken most often since `before`, with how often.
fn since(before: &Hottest, now: Hottest) -> Vec<(u64, u64)> {
    let taken = now.into_iter().map(|(address, sent)| {
        let before = before.get(&address).copied().unwrap_or_default();
        (address, sent.saturating_sub(before))
    });
    let mut taken: Vec<_> = taken.collect();
    taken.sort_by_key(|(address, sent)| (std::cmp::Reverse(*sent), *address));
    taken.truncate(8);
    taken
}

pub(super) fn costs(context: &Context<'_>) -> Result {
    for (parameters, more) in COMPARED {
        let [apart, together] = with(context, parameters, more).context(parameters)?;
        context.note(format!(
            "\"{parameters}\" {more:?}: CPU 1 idle here: {together}; there: {apart} (emulated)"
        ));
    }
    Ok(Verdict::Pass)
}

/// What pieces take while CPU 1 is on the other host, and on the same, with these parameters of the
/// guest's kernel.
fn with(
    context: &Context<'_>,
    parameters: &str,
    more: &[&'static str],
) -> anyhow::Result<[String; 2]> {
    let nodes = TWO.nodes(context)?;
    let mut guest = TWO.guest(CLOUD, &format!("{QUIET}; {WORK}"));
    guest.cmdline.insert_str(0, &format!("{parameters} "));
    guest.more.extend(["--name", NAME]);
    guest.more.extend(more);
    let process = guest.start(context)?;
    let measured = (|| {
        process.wait_for_line(PIECE, DEADLINE)?;
        // The pieces while CPU 1 moves and becomes idle there count for nothing.
        goes(context, "0")?;
        pieces(context, &process)?;
        let together = pieces(context, &process)?.to_string();
        goes(context, "1")?;
        pieces(context, &process)?;
        let before = hottest(context)?;
        let apart = pieces(context, &process)?;
        let hot = since(&before, hottest(context)?);
        anyhow::Ok([format!("{apart}, {hot:x?}"), together])
    })();
    let measured = measured.with_context(|| said(&process, &nodes))?;
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    end(context, nodes)?;
    Ok(measured)
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
    use super::{since, times};

    #[test]
    fn what_pieces_took_is_found_on_the_console() {
        let console = "x\r\npiece 21 of CPU 0\r\npiece 105 of CPU 0\r\n";
        assert_eq!(times(console).unwrap(), [21, 105]);
        assert!(times("piece x of CPU 0").is_err());
    }

    #[test]
    fn pages_are_counted_from_the_beginning_on() {
        let before = [(0x1000, 5), (0x2000, 1)].into();
        let now = [(0x1000, 6), (0x2000, 4), (0x3000, 2)].into();
        assert_eq!(since(&before, now), [(0x2000, 3), (0x3000, 2), (0x1000, 1)]);
    }
}
