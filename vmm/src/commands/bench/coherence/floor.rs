//! The floor of a transfer: the same system calls on two nodes, and nothing else.
//!
//! Each node has one thread, as the engine has, which polls and never sleeps. The near one reads
//! the fault, sends 16 bytes, and resolves the fault; the far one unmaps or protects its page, and
//! answers with 16 bytes, or with a page more. A page that is at a donor comes from a connection to
//! it, of the near node or of the far one.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use fabric_host::slices::request_short_slices;
use fabric_pages::uffd::{EventBuffer, Protection, Uffd};
use fabric_transport::stream::Carrier;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SIZE, PageBytes, PageIndex};

use super::protocol::Exchange;
use crate::commands::bench::floor::Source;
use crate::commands::bench::view::View;

/// Pages that one measurement touches.
pub(super) const SAMPLES: usize = 500;

/// Longest wait for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

const MESSAGE: usize = 16;

/// A memory with an own userfaultfd.
struct Bare {
    memory: Arc<GuestMemory>,
    uffd: Uffd,
}

impl Bare {
    fn new() -> Result<Self> {
        let memory = GuestMemory::new(SAMPLES * PAGE_SIZE).context("cannot create memory")?;
        let memory = Arc::new(memory);
        let uffd = Uffd::new()?;
        uffd.register(memory.guest_view(), memory.bytes())?;
        Ok(Self { memory, uffd })
    }

    fn all(&self) -> impl Iterator<Item = PageIndex> + use<> {
        let pages = self.memory.bytes() / PAGE_SIZE;
        (0..u32::try_from(pages).unwrap_or(u32::MAX)).map(PageIndex::new)
    }

    /// Fills all pages and maps them.
    fn fill(&self, protection: Protection) -> Result<()> {
        for page in self.all() {
            let target = self.memory.guest_page(page);
            self.uffd.copy(target, &[7; PAGE_SIZE], protection)?;
        }
        Ok(())
    }

    /// Forgets all pages.
    fn empty(&self) -> Result<()> {
        self.memory.zap(PageIndex::new(0), SAMPLES)?;
        Ok(self.memory.punch(PageIndex::new(0), SAMPLES)?)
    }
}

fn read_all(stream: &mut TcpStream, into: &mut [u8], stop: &AtomicBool) -> Result<bool> {
    let mut filled = 0;
    let started = Instant::now();
    while filled < into.len() {
        match stream.read(&mut into[filled..]) {
            Ok(0) => return Ok(false),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if stop.load(Ordering::Relaxed) || started.elapsed() > ANSWER_TIME_MAX {
                    bail!("no answer within {} s", ANSWER_TIME_MAX.as_secs());
                }
                std::thread::yield_now();
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

fn write_all(stream: &mut TcpStream, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Answers the exchanges of one connection after the other, until the program ends.
pub(super) fn serve(donor: Option<SocketAddr>) -> Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    std::thread::Builder::new().spawn(move || {
        request_short_slices();
        for stream in listener.incoming().flatten() {
            if let Err(error) = answer(stream, donor) {
                eprintln!("bare exchange: {error:#}");
            }
        }
    })?;
    Ok(address)
}

fn answer(mut stream: TcpStream, donor: Option<SocketAddr>) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    stream.set_nonblocking(true)?;
    let what = match kind[0] {
        0 => Exchange::Write,
        1 => Exchange::Read,
        2 => Exchange::Upgrade,
        _ => return relay(stream, donor.context("no donor for a bare exchange")?),
    };
    let bare = Bare::new()?;
    bare.fill(match what {
        Exchange::Upgrade => Protection::WriteProtected,
        _ => Protection::Writable,
    })?;
    let running = AtomicBool::new(false);
    write_all(&mut stream, &[0; MESSAGE])?;
    let mut request = [0; MESSAGE];
    let mut message = [0; MESSAGE + PAGE_SIZE];
    for page in bare.all() {
        if !read_all(&mut stream, &mut request, &running)? {
            return Ok(());
        }
        match what {
            Exchange::Read => bare.uffd.forbid_writes(bare.memory.guest_page(page))?,
            _ => bare.memory.zap(page, 1)?,
        }
        if what == Exchange::Upgrade {
            write_all(&mut stream, &message[..MESSAGE])?;
            continue;
        }
        bare.memory.read(page, page_of(&mut message));
        write_all(&mut stream, &message)?;
    }
    // The near node closes the connection.
    let _ = read_all(&mut stream, &mut request, &running);
    Ok(())
}

/// Fetches a page from the donor for each request.
fn relay(mut stream: TcpStream, donor: SocketAddr) -> Result<()> {
    let mut source = Source::connect(donor, &Carrier::Tcp, false, 1)?;
    let running = AtomicBool::new(false);
    write_all(&mut stream, &[0; MESSAGE])?;
    let mut request = [0; MESSAGE];
    let mut message = [0; MESSAGE + PAGE_SIZE];
    while read_all(&mut stream, &mut request, &running)? {
        fetch(&mut source, page_of(&mut message), &running)?;
        write_all(&mut stream, &message)?;
    }
    source.release()
}

/// Fetches the page of a donor.
fn fetch(source: &mut Source, page: &mut PageBytes, stop: &AtomicBool) -> Result<()> {
    source.request(0)?;
    let started = Instant::now();
    while !source.receive(page)? {
        if stop.load(Ordering::Relaxed) || started.elapsed() > ANSWER_TIME_MAX {
            bail!(
                "no page from the donor within {} s",
                ANSWER_TIME_MAX.as_secs()
            );
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn page_of(message: &mut [u8; MESSAGE + PAGE_SIZE]) -> &mut PageBytes {
    let (_, page) = message.split_at_mut(MESSAGE);
    page.try_into().expect("a page behind a message")
}

/// The other end of an exchange.
enum Far {
    Nothing,
    Node(TcpStream),
    Donor(Box<Source>),
}

impl Far {
    /// Connects to a node for one kind of exchanges.
    fn node(far: SocketAddr, kind: u8) -> Result<Self> {
        let mut stream = TcpStream::connect(far)?;
        stream.set_nodelay(true)?;
        stream.write_all(&[kind])?;
        stream.read_exact(&mut [0; MESSAGE])?;
        stream.set_nonblocking(true)?;
        Ok(Self::Node(stream))
    }
}

/// Measures accesses that are resolved with the far node's help.
pub(super) fn measure(far: SocketAddr, what: Exchange) -> Result<Vec<u64>> {
    let bare = Bare::new()?;
    if what == Exchange::Upgrade {
        bare.fill(Protection::WriteProtected)?;
    }
    let far = match what {
        Exchange::Write => Far::node(far, 0)?,
        Exchange::Read => Far::node(far, 1)?,
        Exchange::Upgrade => Far::node(far, 2)?,
        Exchange::Relay => Far::node(far, 3)?,
        Exchange::Fetch => Far::Donor(Box::new(Source::connect(far, &Carrier::Tcp, false, 1)?)),
        Exchange::Local => Far::Nothing,
    };
    let stop = AtomicBool::new(false);
    let view = View::new(&bare.memory);
    std::thread::scope(|scope| {
        let handler = scope.spawn(|| {
            request_short_slices();
            let result = resolve(&bare, what, far, &stop);
            if result.is_err() {
                // The thread that touches would wait for ever.
                eprintln!("bare exchange: {result:?}");
                std::process::exit(1);
            }
        });
        let mut times = Vec::with_capacity(SAMPLES);
        for page in 0..SAMPLES {
            let started = Instant::now();
            if matches!(what, Exchange::Read | Exchange::Relay | Exchange::Fetch) {
                view.word(page, 0).load(Ordering::Relaxed);
            } else {
                view.word(page, 0).store(1, Ordering::Relaxed);
            }
            times.push(u64::try_from(started.elapsed().as_nanos())?);
        }
        stop.store(true, Ordering::Relaxed);
        handler.join().expect("the handler does not panic");
        bare.empty()?;
        Ok(times)
    })
}

fn resolve(bare: &Bare, what: Exchange, mut far: Far, stop: &AtomicBool) -> Result<()> {
    let mut events = EventBuffer::new(1);
    let mut faulted = None;
    let mut message = [0; MESSAGE + PAGE_SIZE];
    while !stop.load(Ordering::Relaxed) {
        bare.uffd.read_faults(&mut events, |fault| {
            faulted = bare.memory.page_at(fault.address)
        })?;
        let Some(page) = faulted.take() else {
            std::thread::yield_now();
            continue;
        };
        let target = bare.memory.guest_page(page);
        match &mut far {
            Far::Nothing => {}
            Far::Node(stream) => {
                write_all(stream, &[0; MESSAGE])?;
                let length = match what {
                    Exchange::Upgrade => MESSAGE,
                    _ => message.len(),
                };
                if !read_all(stream, &mut message[..length], stop)? {
                    bail!("the far node ended");
                }
            }
            Far::Donor(source) => fetch(source, page_of(&mut message), stop)?,
        }
        match what {
            Exchange::Write => {
                bare.uffd
                    .copy(target, page_of(&mut message), Protection::Writable)?
            }
            Exchange::Read | Exchange::Relay | Exchange::Fetch => {
                let page = page_of(&mut message);
                bare.uffd.copy(target, page, Protection::WriteProtected)?;
            }
            Exchange::Upgrade => bare.uffd.allow_writes(target)?,
            Exchange::Local => {
                bare.uffd.zero(target, 1)?;
            }
        }
    }
    match far {
        Far::Donor(source) => source.release(),
        Far::Nothing | Far::Node(_) => Ok(()),
    }
}
