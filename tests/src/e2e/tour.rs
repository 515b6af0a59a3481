//! The commands of `docs/tour.md`, run as a new user types them.

use anyhow::{Context as _, ensure};

use super::guest::{GUEST_DEADLINE, SHORT};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::published::Published;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "tour",
    about: "every command of docs/tour.md works, in its order",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: tour,
}];

const TOUR: &str = include_str!("../../../docs/tour.md");

/// Creates the user's empty directory on a Debian machine, which has its kernel in `/boot`.
const MACHINE: &str = "rm -rf /tmp/tour && mkdir -p /tmp/tour /boot && \
    cp /share/full-vmlinuz /boot/vmlinuz-$(uname -r)";

/// Commands that are typed together.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    script: String,
    /// Whether they run until stopped, with others typed elsewhere in the meantime.
    stays: bool,
}

fn tour(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    host.check(&["sh", "-c", MACHINE], SHORT)?;
    let mut staying = Vec::new();
    for block in blocks(TOUR)? {
        let script = format!("set -e; cd /tmp/tour; {}", block.script);
        if block.stays {
            let process =
                host.spawn(&["sh", "-c", &format!("cd /tmp/tour; exec {}", block.script)])?;
            // The user waits for its first output.
            process
                .wait_for_text("\n", 1, GUEST_DEADLINE)
                .with_context(|| block.script.clone())?;
            staying.push((process, block.script));
        } else {
            let output = host.run(&["sh", "-c", &script], GUEST_DEADLINE)?;
            ensure!(
                output.status.code == 0,
                "`{}` ended with {}: {}{}",
                block.script,
                output.status,
                output.stdout,
                output.stderr
            );
        }
    }
    let [(node, _), (guest, _)] = &staying[..] else {
        anyhow::bail!("{} commands stay", staying.len());
    };
    let guest = guest.wait(SHORT).context("the guest that was killed")?;
    ensure!(
        guest.stdout.contains("/tmp/data") && guest.stdout.len() > 64,
        "no checksum: {guest:?}"
    );
    let page = host.check(&["cat", "/tmp/tour/out.html"], SHORT)?;
    ensure!(page.ends_with("</html>\n"), "no page");
    let report = host.check(&["cat", "/tmp/tour/out.json"], SHORT)?;
    let report = Published::Report.parse(&report)?;
    let back = report["nodes"][1]["pages_written_back"].as_u64();
    ensure!(back > Some(4096), "little went to the lender: {back:?}");
    // Ctrl-C.
    node.kill(libc::SIGINT)?;
    let node = node.wait(SHORT)?;
    ensure!(node.status.code == 0, "the node: {node:?}");
    host.check(&["rm", "-r", "/tmp/tour", "/boot"], SHORT)?;
    Ok(Verdict::Pass)
}

/// Extracts the commands of a document. Fails on a block that contains none.
fn blocks(text: &str) -> anyhow::Result<Vec<Block>> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match (inside, line.trim_start().strip_prefix("```")) {
            (false, Some(kind)) => {
                let stays = match kind {
                    "sh" => false,
                    "sh stays" => true,
                    _ => anyhow::bail!("a block of {kind:?} cannot be run: sh, or sh stays"),
                };
                inside = true;
                let script = String::new();
                blocks.push(Block { script, stays });
            }
            (true, Some(_)) => inside = false,
            (true, None) => {
                if let Some(block) = blocks.last_mut() {
                    block.script.push_str(line);
                    block.script.push('\n');
                }
            }
            (false, None) => {}
        }
    }
    ensure!(!inside, "the last block has no end");
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_found_and_what_cannot_be_run_is_refused() {
        let found = blocks("a\n```sh\nb\nc\n```\nd\n```sh stays\ne\n```\n").unwrap();
        let block = |script: &str, stays| Block {
            script: script.into(),
            stays,
        };
        assert_eq!(found, [block("b\nc\n", false), block("e\n", true)]);
        assert!(blocks("```text\nx\n```\n").is_err());
        assert!(blocks("```sh\nx\n").is_err());
    }

    #[test]
    fn the_tour_names_only_commands_that_are_documented() {
        let commands = include_str!("../../../docs/cli.md");
        for block in blocks(TOUR).unwrap() {
            for verb in block
                .script
                .lines()
                .filter_map(|l| l.strip_prefix("ssi-hv "))
            {
                let verb = verb.split(' ').next().unwrap_or_default();
                assert!(commands.contains(&format!("`ssi-hv {verb}")), "{verb}");
            }
        }
    }
}
