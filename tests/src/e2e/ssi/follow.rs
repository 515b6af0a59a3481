//! A CPU that shares memory all the time with one of another host, and goes there by itself; one that
//! idles makes room for it.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::json;

use super::{CLOUD, DEADLINE, Layout, QUIET, TWO, end, said};
use crate::e2e::guest::{Finished, SHORT, exit};
use crate::e2e::status::{number, status};
use crate::e2e::{Context, Result, Verdict};
use crate::testbed::RemoteProcess;

/// Name of the guest.
const NAME: &str = "follow";
/// Two CPUs are on the first host, of which one idles.
const THREE_CPUS: Layout = Layout { cpus: 3, ..TWO };
/// A program on CPU 0 hands a number to one on CPU 2, which hands it back, through two pipes. Each line
/// has how many rounds there were and the hundredths of a second of the guest's clock.
const WORK: &str = "mkfifo /tmp/a /tmp/b; \
    taskset -c 2 sh -c 'exec 3<>/tmp/a 4<>/tmp/b; while read x <&3; do echo $x >&4; done' & \
    exec taskset -c 0 sh -c 'exec 3<>/tmp/a 4<>/tmp/b; n=0; while :; do n=$((n+1)); echo $n >&3; \
    read x <&4; [ $x = $n ] || echo wrong $x instead of $n; \
    read u x < /proc/uptime; echo rounds $n ${u%.*}${u#*.}; done'";
const ROUNDS: &str = "rounds ";
/// The kernel's own work is on CPU 0. Elsewhere it would fight for its data with the other host: in a
/// guest without these CPU 1 waited for pages half of the time.
const PARAMETERS: &str = "isolcpus=nohz,domain,managed_irq,1,2 rcu_nocbs=1,2 irqaffinity=0 ";
/// How long rounds are counted.
const COUNTED: Duration = Duration::from_secs(60);
/// Deadline of a move.
const WITHIN: Duration = Duration::from_secs(180);
/// What the log says when a CPU goes to the node, and when the policy moves it.
const GOES: &str = "the guest has booted: a vCPU moves cpu=2 node=1";
const FOLLOWS: &str = "a vCPU has followed the pages that it waited for";

pub(super) fn follows(context: &Context<'_>) -> Result {
    let stays = rounds(context, "static")?;
    let follows = rounds(context, "follow")?;
    context.note(format!(
        "two programs hand a number to and fro on CPUs of two hosts, {stays:.1} rounds a second; where \
         one follows the other, {follows:.1}: {:.1} times (emulated)",
        follows / stays
    ));
    ensure!(follows > stays, "the policy has made it slower");
    Ok(Verdict::Pass)
}

/// Rounds a second, with CPU 2 on the other host, where a policy has it stay or come back.
fn rounds(context: &Context<'_>, policy: &'static str) -> anyhow::Result<f64> {
    let nodes = THREE_CPUS.nodes(context)?;
    let mut guest = THREE_CPUS.guest(CLOUD, &format!("{QUIET}; {WORK}"));
    guest.cmdline.insert_str(0, PARAMETERS);
    guest.more.extend(["--name", NAME, "--vcpu-policy", policy]);
    let process = guest.start(context)?;
    let measured = (|| {
        process.wait_for_line(GOES, WITHIN)?;
        process.wait_for_line(ROUNDS, DEADLINE)?;
        if policy == "follow" {
            process
                .wait_for_line(FOLLOWS, WITHIN)
                .with_context(|| why(context))?;
        }
        let rate = rate(&process)?;
        let status = status(context.testbed.host(1), &[NAME])?;
        let moves = number(&status, "/vms/0/vcpu_policy/moves")?;
        // One of those that share goes to the other's host, and the one that idles takes its place.
        let cpus = |node: usize| &status["vms"][0]["nodes"][node]["cpus"];
        let places = [json!([0, 2]), json!([1])];
        let has_followed = moves == 2 && [cpus(0), cpus(1)] == places.each_ref();
        ensure!(
            has_followed == (policy == "follow") && (has_followed || moves == 0),
            "the policy {policy} has made {moves} moves: {}, {}",
            status["vms"][0]["nodes"],
            status["vms"][0]["vcpu_policy"]
        );
        anyhow::Ok(rate)
    })();
    let rate = measured.with_context(|| format!("{policy}: {}", said(&process, &nodes)))?;
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    let console = &guest.output.stdout;
    ensure!(!console.contains("wrong"), "console: {console}");
    end(context, nodes)?;
    Ok(rate)
}

/// Why vCPUs stay, for errors.
fn why(context: &Context<'_>) -> String {
    let status = status(context.testbed.host(1), &[NAME]);
    status.map_or_else(
        |error| format!("no status: {error:#}"),
        |status| {
            format!(
                "{}, {}",
                status["vms"][0]["vcpu_policy"], status["vms"][0]["vcpus"]
            )
        },
    )
}

/// Rounds a second of the guest's clock from now on.
fn rate(process: &RemoteProcess) -> anyhow::Result<f64> {
    let begin = last_round(&process.stdout()).context("no round")?;
    std::thread::sleep(COUNTED);
    let end = last_round(&process.stdout()).context("no round")?;
    ensure!(end.1 > begin.1, "the guest's clock stands still at {end:?}");
    #[allow(clippy::cast_precision_loss, reason = "a few numbers")]
    Ok((end.0 - begin.0) as f64 * 100.0 / (end.1 - begin.1) as f64)
}

/// How many rounds there were and when, in hundredths of a second, by the last whole line of them.
fn last_round(console: &str) -> Option<(u64, u64)> {
    let (whole, _) = console.rsplit_once('\n')?;
    let line = whole.lines().rev().find(|line| line.contains(ROUNDS))?;
    let mut words = line.split_once(ROUNDS)?.1.split_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::last_round;

    #[test]
    fn the_last_whole_line_counts() {
        let console = "x\r\nrounds 1 100\r\nrounds 20 345\r\nrounds 2";
        assert_eq!(last_round(console), Some((20, 345)));
        assert_eq!(last_round("rounds 1 2"), None);
        assert_eq!(last_round("rounds x 2\n"), None);
    }
}
