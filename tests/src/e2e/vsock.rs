//! The scenario of sockets between guest and host, and of the console at a socket.

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "vsock",
    about: "guest and host connect to each other by sockets, and bytes go both ways unharmed; hvc0 does the same",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: vsock,
}];

/// The guest listens and computes the checksum of what it receives. It then connects to the host
/// and sends bytes while a probe moves memory, and finally connects to a port without a listener.
const WORK: &str = "faultprobe --bytes 48M & \
    socket-pipe vsock-listen 52 </dev/null | sha256sum >/tmp/got; echo got=$(cat /tmp/got); \
    dd if=/dev/urandom of=/tmp/p bs=1M count=4; echo sent=$(sha256sum </tmp/p); \
    socket-pipe vsock-connect 9000 </tmp/p >/tmp/back; echo status=$?; echo back=$(cat /tmp/back); \
    socket-pipe vsock-connect 9001 </dev/null; echo refused=$?; wait; \
    exec 9<>/dev/hvc0; stty raw -echo <&9; echo raw=$?; seq 1 8000 >&9; head -c 200000 <&9 | sha256sum >/tmp/h; \
    echo hvc=$(cat /tmp/h)";

fn vsock(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let script = |text: &str| host.check(&["sh", "-c", text], SHORT);
    script("rm -f /tmp/vm.vsock*; dd if=/dev/urandom of=/tmp/to-guest bs=1M count=4")?;
    let given = script("sha256sum </tmp/to-guest")?;
    let listener = host.spawn(&[
        "sh",
        "-c",
        "echo welcome | /share/socket-pipe unix-listen /tmp/vm.vsock_9000 | sha256sum",
    ])?;

    let donor = Donor::start(context)?;
    let mut guest = Guest::small(2, WORK);
    guest
        .cmdline
        .push_str(" ssi_modules=\"vmw_vsock_virtio_transport virtio_console\"");
    guest.more.extend(["--vsock", "cid=3,path=/tmp/vm.vsock"]);
    guest.more.extend(["--hvc", "/tmp/vm.hvc"]);
    let process = guest.boot(context)?;
    process.wait_for_line("socket-pipe: listens on port 52", GUEST_DEADLINE)?;
    let client = host.spawn(&[
        "sh",
        "-c",
        "/share/socket-pipe guest-connect /tmp/vm.vsock 52 </tmp/to-guest",
    ])?;
    // A terminal that is not raw would interpret some of these bytes.
    process.wait_for_line("raw=0", GUEST_DEADLINE)?;
    // Types everything before the guest reads it, and reads to the end of the guest's output.
    let terminal = host.spawn(&[
        "sh",
        "-c",
        "head -c 200000 /tmp/to-guest | /share/socket-pipe unix-connect /tmp/vm.hvc | sha256sum",
    ])?;
    let output = process.wait(GUEST_DEADLINE)?;
    let guest = Finished::read(context, output)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(48 << 20)?;
    donor.stop(context)?;
    let client = client.wait(SHORT)?;
    ensure!(
        client.status.code == 0,
        "the client failed: {}",
        client.stderr
    );
    let listened = listener.wait(SHORT)?;
    ensure!(
        listened.status.code == 0,
        "the listener failed: {}",
        listened.stderr
    );

    let console = &guest.output.stdout;
    let word = |name: &str| {
        // The kernel prints its command line first.
        let rest = console.rsplit_once(name).map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("the guest printed no {name:?}"))
    };
    let given = given.split_whitespace().next().unwrap_or_default();
    let (got, sent, back) = (word("got=")?, word("sent=")?, word("back=")?);
    ensure!(got == given, "given {given}, the guest got {got}");
    ensure!(
        word("status=")? == "0",
        "the guest cannot connect to its host"
    );
    ensure!(back == "welcome", "the guest heard {back:?}");
    let heard = listened.stdout;
    let heard = heard.split_whitespace().next().unwrap_or_default();
    ensure!(sent == heard, "sent {sent}, the host heard {heard}");
    ensure!(
        word("refused=")? == "1",
        "a port without a listener was connected to"
    );
    let typed = script("head -c 200000 /tmp/to-guest | sha256sum")?;
    let typed = typed.split_whitespace().next().unwrap_or_default();
    let read = word("hvc=")?;
    ensure!(read == typed, "typed {typed}, hvc0 gave {read}");
    let seen = terminal.wait(SHORT)?.stdout;
    // Less than the buffer for a slow client. The terminal is raw, so lines arrive unchanged.
    let due = script("seq 1 8000 | sha256sum")?;
    ensure!(seen == due, "hvc0 showed {seen:?}, {due:?} was written");
    let left = script("ls /tmp/vm.vsock /tmp/vm.hvc 2>/dev/null || echo none")?;
    ensure!(left.trim() == "none", "the socket is left behind");
    Ok(Verdict::Pass)
}
