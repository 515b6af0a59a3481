//! The scenario of RDMA connections with settings that differ from the defaults.

use anyhow::{Context as _, ensure};
use serde_json::json;

use super::bed::{add_rxe, remove_rxe};
use super::control::ask;
use super::donor::Donor;
use super::guest::{BOOT_DEADLINE, Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::rdma::rdma_of;
use super::status::status;
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::Host;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "rdma_settings",
    about: "pages travel between addresses, in packets and with requests that --rdma sets, and what does not fit is refused",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: settings,
}];

/// Moves memory, reports that, and waits for the other half of the scenario.
const WORK: &str = "faultprobe --bytes 128M && echo moved=$((1)); until [ -e /sys/kernel/never ]; do sleep 1; done";
/// Bytes of a packet: the set MTU, and at most as many for headers of Ethernet, IP, UDP and RoCE.
const PACKET_BYTES_MAX: u64 = 512 + 128;

/// Gives the interface to the other host a second address, and returns the index of that in the
/// device's table.
fn second_address(host: &Host) -> anyhow::Result<String> {
    let number = host.number();
    let link = format!("link{}", 3 - number);
    let address = format!("10.78.0.{number}/24");
    host.check(&["ip", "address", "add", &address, "dev", &link], SHORT)?;
    let gid = format!("0000:0000:0000:0000:0000:ffff:0a4e:000{number}");
    // The entry is added by a worker of the kernel.
    let script = "i=0; while [ $i -lt 50 ]; do i=$((i+1)); \
                  for f in /sys/class/infiniband/rxe0/ports/1/gids/*; do \
                  [ \"$(cat $f)\" = $1 ] && basename $f && exit; done; usleep 100000; done; exit 1";
    let found = host.check(&["sh", "-c", script, "sh", &gid], SHORT)?;
    Ok(found.trim().to_owned())
}

/// Returns the mean size of a packet that came over the link since its counters were zero.
fn packet_bytes(host: &Host, before: (u64, u64)) -> anyhow::Result<u64> {
    let (packets, bytes) = received(host)?;
    Ok((bytes - before.1) / (packets - before.0).max(1))
}

fn received(host: &Host) -> anyhow::Result<(u64, u64)> {
    let link = format!("link{}", 3 - host.number());
    let script =
        "cat /sys/class/net/$1/statistics/rx_packets /sys/class/net/$1/statistics/rx_bytes";
    let said = host.check(&["sh", "-c", script, "sh", &link], SHORT)?;
    let mut numbers = said.lines().filter_map(|line| line.trim().parse().ok());
    let pair = numbers.next().zip(numbers.next());
    pair.with_context(|| format!("no counters in {said:?}"))
}

fn settings(context: &Context<'_>) -> Result {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let (here, there) = (second_address(one)?, second_address(two)?);
    ensure!(here != "0" && there != "0", "{here}, {there}: the default");
    let lending = format!("gid-index={there},mtu=1024,peers=10.78.0.1");
    let donor = Donor::lending(
        context,
        "1G",
        &["--rdma-device", "rxe0", "--rdma", &lending],
    )?;
    let asked = format!(
        "device=rxe0,port=1,gid-index={here},mtu=512,depth=8,traffic-class=104,staging=1M,\
         timeout=15,retries=5,completion=poll,partition=0xffff,peers=10.78.0.2"
    );
    let before = received(one)?;
    let mut guest = Guest::remote(1, WORK);
    guest.more.extend([
        "--transport",
        "rdma",
        "--name",
        "set",
        "--rdma",
        asked.leak(),
    ]);
    let process = guest.boot(context)?;
    process.wait_for_line("moved=1", BOOT_DEADLINE + GUEST_DEADLINE)?;
    let bytes = packet_bytes(one, before)?;
    let vm = format!("vm-{}-set", process.pid());
    let now = ask(context, &vm, "GET", "/v1/transport", "")?;
    let used = &now["donors"][0]["rdma"];
    let expected = json!({
        "device": "rxe0", "port": 1, "gid_index": here.parse::<u8>()?, "gid": "10.78.0.1",
        "donor_gid": "10.78.0.2", "mtu_bytes": 512, "depth": 8, "traffic_class": 104,
        "timeout_exponent": 15, "retries": 5, "polls": true, "partition_index": 0,
    });
    let differing = expected.as_object().into_iter().flatten();
    let differing: Vec<_> = differing
        .filter(|(key, value)| used[key.as_str()] != **value)
        .collect();
    ensure!(differing.is_empty(), "not {differing:?}: {now}");
    ensure!(now["donors"][0]["faults_now"] == "rdma", "{now}");
    ensure!(
        now["donors"][0]["reason"] == "asked for by --transport",
        "{now}"
    );
    ensure!(
        bytes <= PACKET_BYTES_MAX,
        "packets of {bytes} bytes on average, with an MTU of 512"
    );
    let ends = status(two, &[])?;
    let endpoint = &ends["nodes"][0]["rdma"]["endpoints"][0];
    ensure!(
        endpoint["here"]["address"] == "10.78.0.2" && endpoint["there"]["address"] == "10.78.0.1",
        "{endpoint}"
    );
    one.check(&["ssi-hv", "kill", "set"], SHORT)?;
    let finished = Finished::read(context, process.wait(SHORT)?)?;
    let rdma = rdma_of(&finished)?;
    ensure!(rdma.pages_read > 1000 && rdma.failures == 0, "{rdma:?}");
    context.note(format!(
        "{} pages by READ and {} by WRITE between 10.78.0.1 and 10.78.0.2, in packets of {bytes} bytes on average",
        rdma.pages_read, rdma.pages_written
    ));
    refused(context, "gid-index=77", "rxe0 port 1 has: 0 (")?;
    refused(context, "partition=0x8123", "has: 0xffff")?;
    refused(context, "device=mlx5_3", "there are: rxe0")?;
    donor.stop(context)?;
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}

/// Checks that a VM with a setting that does not fit does not start, and that its error has the
/// setting and what fits.
fn refused(context: &Context<'_>, setting: &'static str, part: &str) -> anyhow::Result<()> {
    let mut guest = Guest::remote(1, "true");
    guest
        .more
        .extend(["--transport", "rdma", "--rdma", setting]);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::HOST_ERROR)?;
    let said = &guest.output.stderr;
    let value = setting.split_once('=').map_or(setting, |(_, value)| value);
    ensure!(
        said.contains(value) && said.contains(part),
        "{setting}: {said}"
    );
    Ok(())
}
