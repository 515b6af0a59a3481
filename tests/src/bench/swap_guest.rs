//! Guests of the comparison with swap: their initramfs, their command line, and the parser for
//! their output.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use kernel_images::{ImageCache, Manifest, command, initramfs, programs};
use serde_json::{Value, json};

use crate::e2e::parse_faultprobe;
use crate::share::Share;
use crate::testbed::{Host, add_text, add_tools_with_libraries};

/// The guest's script.
const SCRIPT: &str = include_str!("swap_guest.sh");
/// The guest's initramfs in the shared directory.
pub(super) const INITRAMFS: &str = "guest-swap.cpio.gz";
/// Debian programs to include, each with its package.
const TOOLS: &[(&str, &str)] = &[("nbd-client", "nbd-client")];
/// Kernel modules to load in addition to those of every guest.
const MODULES: &[&str] = &["nbd"];
/// Deadline of a guest from start to exit: twice the time it takes on a busy machine.
pub(super) const GUEST_DEADLINE: Duration = Duration::from_secs(420);
/// The monitor's report on its host.
const REPORT: &str = "/tmp/swap-guest.json";
/// The tap of the guest's network card on host 1.
pub(super) const TAP: &str = "tap0";

/// Writes the initramfs that both sides boot.
pub(super) fn prepare(workspace: &Path, share: &Share) -> anyhow::Result<()> {
    let cache = ImageCache::open(&workspace.join("target/images"))?;
    let image = cache.ensure(Manifest::built_in()?.kernel("cloud")?)?;
    let tools = programs::build_static(workspace, &["testbed-agent", "faultprobe"])?;
    let out = share.dir.join(INITRAMFS);
    let plain = out.with_extension("");
    initramfs::write_guest_with(&image, &tools, &plain, MODULES, |archive| {
        add_text(archive, "bin/swap-guest", 0o755, SCRIPT)?;
        add_tools_with_libraries(archive, TOOLS)
    })?;
    // The swapping guest has little memory and holds the initramfs twice while unpacking it.
    command::output(
        Command::new("gzip").args(["-n", "-f"]).arg(&plain),
        "gzip",
        "look whether the disk is full",
    )?;
    Ok(())
}

/// Runs a guest to its end with these flags in addition to the common ones. Returns what the
/// program printed, further data on the guest, and the monitor's report.
pub(super) fn run(
    host: &Host,
    work: &str,
    flags: &[&str],
    console: &Path,
) -> anyhow::Result<(Value, Value)> {
    let cmdline = format!("ssi_modules=\"virtio_net nbd\" ssi_exec=\"/bin/swap-guest {work}\"");
    let initrd = format!("/share/{INITRAMFS}");
    let net = format!("tap={TAP}");
    let mut argv = vec![
        "/share/ssi-hv",
        "run",
        "--insecure",
        "--kernel",
        "/share/cloud-vmlinuz",
        "--initrd",
        &initrd,
        "--net",
        &net,
        "--cmdline",
        &cmdline,
        "--report",
        REPORT,
    ];
    argv.extend(flags);
    let mut log = std::fs::File::create(console).with_context(|| console.display().to_string())?;
    let tap = move |bytes: &[u8]| {
        // Best effort: the same text is kept in memory and quoted in errors.
        let _ = std::io::Write::write_all(&mut log, bytes);
    };
    let output = host
        .spawn_with(&argv, &[], Box::new(tap))?
        .wait(GUEST_DEADLINE)?;
    check_failed(&output.stdout, console)?;
    ensure!(
        output.status.code == 0,
        "the guest ended with {}: {}; its console is in {}",
        output.status,
        output.stderr.trim(),
        console.display()
    );
    let run = parse(&output.stdout)
        .with_context(|| format!("its console is in {}", console.display()))?;
    let copy = console.with_extension("json");
    host.get(REPORT, &copy)?;
    let report = serde_json::from_str(&std::fs::read_to_string(&copy)?)
        .with_context(|| copy.display().to_string())?;
    Ok((run, report))
}

/// Fails if the guest's script did, with what it said.
pub(super) fn check_failed(output: &str, console: &Path) -> anyhow::Result<()> {
    if let Some((_, why)) = output.split_once("BENCH failed ") {
        bail!(
            "in the guest: {}; its console is in {}",
            why.lines().next().unwrap_or_default().trim(),
            console.display()
        );
    }
    Ok(())
}

/// Parses faultprobe's output and the `BENCH` lines around it.
pub(super) fn parse(console: &str) -> anyhow::Result<Value> {
    let mut said = BTreeMap::new();
    for line in console.lines() {
        let Some((_, text)) = line.split_once("BENCH ") else {
            continue;
        };
        let (key, value) = text.trim().split_once(' ').unwrap_or((text, ""));
        let value: u64 = value
            .parse()
            .with_context(|| format!("malformed line {line:?}"))?;
        said.insert(key, value);
    }
    let value = |key: &str| {
        let value = said.get(key).copied();
        value.with_context(|| format!("the guest did not report {key}"))
    };
    let mut run = parse_faultprobe(console)?;
    ensure!(
        run["corrupt_bytes"] == 0 && run["verified_bytes"].as_u64() > Some(0),
        "{} bytes of {} are wrong",
        run["corrupt_bytes"],
        run["verified_bytes"]
    );
    for key in ["total", "available", "swap"] {
        run[format!("{key}_bytes")] = json!(value(&format!("{key}_kib"))? << 10);
    }
    let (before, after) = (value("swapped_in_before")?, value("swapped_in_after")?);
    run["pages_swapped_in"] = json!(after.saturating_sub(before));
    if let Ok(cluster) = value("page_cluster") {
        run["page_cluster"] = json!(cluster);
    }
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "BENCH page_cluster 3\r\nBENCH total_kib 100\r\nBENCH available_kib 30\r\n\
        BENCH swap_kib 64\r\nBENCH swapped_in_before 5\r\n\
        [ 1.0] FAULTPROBE {\"corrupt_bytes\":0,\"verified_bytes\":8}\r\n\
        BENCH swapped_in_after 9\r\n";

    #[test]
    fn a_run_has_what_was_said_of_it() {
        let run = parse(LINES).unwrap();
        assert_eq!(run["pages_swapped_in"], 4);
        assert_eq!(run["available_bytes"], 30 << 10);
        assert_eq!(run["page_cluster"], 3);
    }

    #[test]
    fn a_run_that_lacks_something_is_an_error_and_no_skip() {
        for gone in [
            "BENCH available_kib 30",
            "BENCH swapped_in_before 5",
            "BENCH swapped_in_after 9",
            "[ 1.0] FAULTPROBE",
        ] {
            assert!(parse(&LINES.replace(gone, "")).is_err(), "{gone}");
        }
        let corrupt = LINES.replace("corrupt_bytes\":0", "corrupt_bytes\":1");
        assert!(parse(&corrupt).unwrap_err().to_string().contains("wrong"));
    }
}
