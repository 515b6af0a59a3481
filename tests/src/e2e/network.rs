//! Scenarios of network cards, and of the entropy device.

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{BOOT_DEADLINE, Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "network",
        about: "a guest on a tap is pinged, and bytes go both ways unharmed while memory moves",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: network,
    },
    Scenario {
        name: "network_tap_down",
        about: "a tap that is down loses packets with one warning, and works again when it is up",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: network_tap_down,
    },
    Scenario {
        name: "random_numbers",
        about: "the guest has random numbers of its host, and none with --rng off",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: random_numbers,
    },
];

/// Creates the tap `tap0` with the address that the guest knows as its host's.
const MAKE_TAP: &str = "ip tuntap add dev tap0 mode tap && ip addr add 192.168.77.1/24 dev tap0";
const DELETE_TAP: &str = "ip link delete tap0";
const GUEST_ADDRESS: &str = "192.168.77.2";
/// Address of the guest's network card.
const MAC: &str = "02:00:00:00:77:02";
/// The longest packet of Ethernet with its header. A longer one is possible only with segmentation
/// or receive offload.
const PACKET_BYTES_MAX: u64 = 1514;

/// Configures the network card, pings the host, and transfers bytes in both directions while a
/// probe moves memory. Then waits for a connection from the host.
const WORK: &str = "ip addr add 192.168.77.2/24 dev eth0; ip link set eth0 up; \
    ping -c 5 192.168.77.1; echo pinged=$?; echo mac=$(cat /sys/class/net/eth0/address); \
    faultprobe --bytes 48M & \
    socket-pipe tcp-connect 192.168.77.1:9000 </dev/null | sha256sum >/tmp/got; echo got=$(cat /tmp/got); \
    dd if=/dev/urandom of=/tmp/p bs=1M count=8; echo sent=$(sha256sum </tmp/p); \
    socket-pipe tcp-connect 192.168.77.1:9001 </tmp/p; wait; echo done=$?; \
    socket-pipe tcp-listen 192.168.77.2:9002 </dev/null";

fn network(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let script = |text: &str| host.check(&["sh", "-c", text], SHORT);
    script(MAKE_TAP)?;
    script("ip link set tap0 up && dd if=/dev/urandom of=/tmp/to-guest bs=1M count=8")?;
    let given = script("sha256sum </tmp/to-guest")?;
    let sender = host.spawn(&[
        "sh",
        "-c",
        "/share/socket-pipe tcp-listen 192.168.77.1:9000 </tmp/to-guest",
    ])?;
    let receiver = host.spawn(&[
        "sh",
        "-c",
        "/share/socket-pipe tcp-listen 192.168.77.1:9001 </dev/null | sha256sum",
    ])?;

    let donor = Donor::start(context)?;
    let mut guest = Guest::small(2, WORK);
    guest.cmdline.push_str(" ssi_modules=virtio_net");
    guest
        .more
        .extend(["--net", "tap=tap0,mac=02:00:00:00:77:02"]);
    let process = guest.boot(context)?;
    process.wait_for_line("done=0", GUEST_DEADLINE)?;
    let pings = script(&format!("ping -c 5 {GUEST_ADDRESS}"));
    // Lets the guest continue to its end.
    let connect = format!(
        "i=0; until /share/socket-pipe tcp-connect {GUEST_ADDRESS}:9002 </dev/null; do i=$((i+1)); [ $i -lt 100 ] || exit 1; sleep 0.1; done"
    );
    script(&connect)?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    pings.context("the host cannot ping the guest")?;
    guest.faultprobe_over(48 << 20)?;
    donor.stop(context)?;
    ensure!(sender.wait(SHORT)?.status.code == 0);
    let received = receiver.wait(SHORT)?.stdout;

    let console = &guest.output.stdout;
    let word = |name: &str| {
        // The kernel prints its command line first.
        let rest = console.rsplit_once(name).map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("the guest printed no {name:?}"))
    };
    let sum = |text: &str| {
        text.split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    ensure!(word("pinged=")? == "0", "the guest cannot ping its host");
    ensure!(word("mac=")? == MAC, "its address is {}", word("mac=")?);
    let (got, sent) = (word("got=")?, word("sent=")?);
    ensure!(got == sum(&given), "given {given}, the guest got {got}");
    ensure!(sent == sum(&received), "sent {sent}, got {received}");

    // The tap's counters show merged packets in both directions.
    let mut means = Vec::new();
    for direction in ["rx", "tx"] {
        let counter = |what: &str| -> anyhow::Result<u64> {
            let path = format!("cat /sys/class/net/tap0/statistics/{direction}_{what}");
            Ok(script(&path)?.trim().parse()?)
        };
        let mean = counter("bytes")? / counter("packets")?.max(1);
        means.push(mean);
    }
    script(DELETE_TAP)?;
    context.note(format!(
        "mean packet {} bytes from the guest, {} to it",
        means[0], means[1]
    ));
    // Acknowledgements are short, so a mean above one whole packet needs long ones.
    ensure!(
        means.iter().all(|mean| *mean > PACKET_BYTES_MAX),
        "no packets were joined: {means:?} bytes in the mean"
    );
    Ok(Verdict::Pass)
}

fn network_tap_down(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let script = |text: &str| host.check(&["sh", "-c", text], SHORT);
    script(MAKE_TAP)?;
    let mut guest = Guest::local(
        1,
        "ip addr add 192.168.77.2/24 dev eth0; ip link set eth0 up; \
         until ping -c 1 -W 1 192.168.77.1; do :; done; echo pinged=$?",
    );
    guest.cmdline.push_str(" ssi_modules=virtio_net");
    guest.more.extend(["--net", "tap=tap0"]);
    let process = guest.boot(context)?;
    let warned = process.wait_for_line("ip link set tap0 up", BOOT_DEADLINE);
    script("ip link set tap0 up")?;
    let output = process.wait(GUEST_DEADLINE)?;
    script(DELETE_TAP)?;
    warned?;
    let guest = Finished::read(context, output)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    ensure!(guest.output.stdout.contains("pinged=0"), "no answer");
    let warnings = guest
        .output
        .stderr
        .matches("are lost while the tap")
        .count();
    ensure!(
        warnings == 1,
        "{warnings} warnings: {}",
        guest.output.stderr
    );
    Ok(Verdict::Pass)
}

fn random_numbers(context: &Context<'_>) -> Result {
    const LOOK: &str = "echo from=$(cat /sys/class/misc/hw_random/rng_current); \
        for i in 1 2; do echo sum$i=$(dd if=/dev/hwrng bs=1k count=4 | sha256sum); done";
    let mut sums = Vec::new();
    for (rng, source) in [("on", "virtio_rng.0"), ("off", "none")] {
        let mut guest = Guest::local(1, LOOK);
        guest.cmdline.push_str(" ssi_modules=virtio_rng");
        guest.more.extend(["--rng", rng]);
        let guest = guest.run(context)?;
        guest.expect_exit(exit::SHUTDOWN)?;
        let console = &guest.output.stdout;
        let from = format!("from={source}");
        ensure!(console.contains(&from), "--rng {rng}: no {from:?}");
        if rng == "on" {
            for name in ["sum1=", "sum2="] {
                let rest = console.rsplit_once(name).map(|(_, rest)| rest);
                let sum = rest.and_then(|rest| rest.split_whitespace().next());
                sums.push(sum.unwrap_or_default().to_owned());
            }
        }
    }
    ensure!(
        sums.iter().all(|sum| sum.len() == 64) && sums[0] != sums[1],
        "no two different checksums: {sums:?}"
    );
    Ok(Verdict::Pass)
}
