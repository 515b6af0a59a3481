//! A hostile donor: it answers requests for pages with other bytes than it was given.
//!
//! It is a proxy before a real donor. It remembers what was written at each offset, so it has
//! everything that a donor has to forge pages with.

use fabric_wire::{FrameKind, HEADER_BYTES};
use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

const PAGE: usize = 4096;

type Bytes = Box<[u8; PAGE]>;

/// What is sent instead of a page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Forgery {
    /// The page itself.
    None,
    /// One bit is flipped.
    FlippedBit,
    /// The page of another offset.
    OtherPage,
    /// The page of another VM at the same offset.
    OtherVm,
    /// What was written there before.
    OldVersion,
    /// A part of the page, and the rest of what was written there before.
    Torn,
}

/// What was written at an offset, now and before.
#[derive(Debug)]
struct Stored {
    now: Bytes,
    before: Option<Bytes>,
}

#[derive(Debug, Default)]
struct State {
    pages: HashMap<u64, Stored>,
    /// Pieces of pages, now and before.
    pieces: HashMap<u64, [Vec<u8>; 2]>,
    /// Pages that were forged, and are sent as they are the next time.
    forged: HashSet<u64>,
    /// The page that is forged each time.
    permanently: Option<u64>,
    /// Whether all are.
    all: bool,
    forgeries: u64,
}

/// Bytes that a donor has, by offset.
pub type Slab = HashMap<u64, Bytes>;

/// A hostile donor before a real one.
#[derive(Debug)]
pub struct Hostile {
    pub address: SocketAddr,
    forgery: Arc<Mutex<Forgery>>,
    state: Arc<Mutex<State>>,
}

impl Hostile {
    /// Starts one that forges nothing yet; `foreign` is what another VM has written.
    pub fn new(donor: SocketAddr, foreign: Slab) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (forgery, state) = (Arc::new(Mutex::new(Forgery::None)), Arc::default());
        let way = Way {
            forgery: Arc::clone(&forgery),
            state: Arc::clone(&state),
            foreign: Arc::new(foreign),
        };
        // Ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let way = way.clone();
                std::thread::spawn(move || way.pass(&client, donor));
            }
        });
        Self {
            address,
            forgery,
            state,
        }
    }

    /// From now on each answer for a page is forged in this way, once: the next is genuine.
    pub fn forge(&self, forgery: Forgery) {
        *self.forgery.lock().unwrap() = forgery;
    }

    /// Forges the page at this offset each time.
    pub fn forge_permanently(&self, offset: u64) {
        self.state.lock().unwrap().permanently = Some(offset);
    }

    /// Forges every page from now on, each time; of pieces, in the way that was set.
    pub fn forge_all(&self) {
        self.state.lock().unwrap().all = true;
    }

    /// Returns how many answers were forged.
    pub fn forgeries(&self) -> u64 {
        self.state.lock().unwrap().forgeries
    }

    /// Returns what the donor has.
    pub fn slab(&self) -> Slab {
        let state = self.state.lock().unwrap();
        let pages = state.pages.iter();
        pages
            .map(|(offset, stored)| (*offset, stored.now.clone()))
            .collect()
    }
}

#[derive(Clone)]
struct Way {
    forgery: Arc<Mutex<Forgery>>,
    state: Arc<Mutex<State>>,
    foreign: Arc<Slab>,
}

fn read_frame(mut stream: &TcpStream) -> std::io::Result<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    stream.read_exact(&mut frame)?;
    let length = u32::from_le_bytes(frame[8..12].try_into().expect("four bytes"));
    frame.resize(HEADER_BYTES + length as usize, 0);
    stream.read_exact(&mut frame[HEADER_BYTES..])?;
    Ok(frame)
}

fn offset_of(frame: &[u8]) -> u64 {
    u64::from_le_bytes(frame[24..32].try_into().expect("eight bytes"))
}

impl Way {
    fn pass(&self, client: &TcpStream, donor: SocketAddr) {
        let Ok(donor) = TcpStream::connect(donor) else {
            return;
        };
        for stream in [client, &donor] {
            stream.set_nodelay(true).expect("a socket");
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = self.requests(client, &donor);
                let _ = donor.shutdown(Shutdown::Both);
            });
            let _ = self.answers(&donor, client);
            let _ = client.shutdown(Shutdown::Both);
            let _ = donor.shutdown(Shutdown::Both);
        });
    }

    /// Remembers what is written.
    fn requests(&self, client: &TcpStream, mut donor: &TcpStream) -> std::io::Result<()> {
        loop {
            let frame = read_frame(client)?;
            if frame[3] == FrameKind::WritePage as u8 {
                let page = &frame[HEADER_BYTES..];
                let page: &[u8; PAGE] = page.try_into().expect("pages are not packed");
                let (offset, now) = (offset_of(&frame), Box::new(*page));
                let mut state = self.state.lock().unwrap();
                let before = state.pages.remove(&offset).map(|stored| stored.now);
                state.pages.insert(offset, Stored { now, before });
            }
            if frame[3] == FrameKind::WritePiece as u8 {
                let now = frame[HEADER_BYTES..].to_vec();
                let mut state = self.state.lock().unwrap();
                let stored = state.pieces.remove(&offset_of(&frame));
                let before = stored.map_or_else(|| vec![0; now.len()], |[now, _]| now);
                state.pieces.insert(offset_of(&frame), [now, before]);
            }
            donor.write_all(&frame)?;
        }
    }

    /// Forges answers.
    fn answers(&self, donor: &TcpStream, mut client: &TcpStream) -> std::io::Result<()> {
        loop {
            let mut frame = read_frame(donor)?;
            let is_page = frame[3] == FrameKind::PageData as u8;
            if is_page || frame[3] == FrameKind::PagesData as u8 {
                let first = offset_of(&frame);
                let (pages, _) = frame[HEADER_BYTES..].as_chunks_mut::<PAGE>();
                // One page of a run, which is then requested again as a whole.
                let permanently = self.state.lock().unwrap().permanently;
                let mut offsets = (0..pages.len()).map(|page| first + (page * PAGE) as u64);
                let at = offsets.position(|offset| permanently == Some(offset));
                let at = at.unwrap_or(pages.len() / 2);
                self.replace(first + (at * PAGE) as u64, &mut pages[at]);
            }
            if frame[3] == FrameKind::PieceData as u8 {
                let offset = offset_of(&frame);
                self.replace_piece(offset, &mut frame[HEADER_BYTES..]);
            }
            client.write_all(&frame)?;
        }
    }

    /// Replaces the first of consecutive pieces.
    fn replace_piece(&self, offset: u64, bytes: &mut [u8]) {
        let forgery = *self.forgery.lock().unwrap();
        let mut state = self.state.lock().unwrap();
        let is_once = !state.all;
        if forgery == Forgery::None || (is_once && state.forged.remove(&offset)) {
            return;
        }
        let Some([now, before]) = state.pieces.get(&offset) else {
            return;
        };
        let count = now.len();
        let number = state.forgeries.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let place = usize::try_from(number % count as u64).expect("in a piece");
        let mut forged = bytes[..count].to_vec();
        let next = state.pieces.get(&(offset + count as u64));
        match (forgery, next) {
            (Forgery::OldVersion, _) => forged.copy_from_slice(before),
            (Forgery::Torn, _) => forged[place..].copy_from_slice(&before[place..]),
            (Forgery::OtherPage, Some([other, _])) => forged.copy_from_slice(other),
            _ => forged[place] ^= 1 << (number >> 13 & 7),
        }
        if forged == bytes[..count] {
            return;
        }
        bytes[..count].copy_from_slice(&forged);
        state.forgeries += 1;
        if is_once {
            state.forged.insert(offset);
        }
    }

    fn replace(&self, offset: u64, page: &mut [u8; PAGE]) {
        let forgery = *self.forgery.lock().unwrap();
        let mut state = self.state.lock().unwrap();
        if state.all || state.permanently == Some(offset) {
            page[17] ^= 1;
            state.forgeries += 1;
            return;
        }
        if forgery == Forgery::None || state.forged.remove(&offset) {
            return;
        }
        // Differs from one forgery to the next.
        let number = state.forgeries.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let place = usize::try_from(number % PAGE as u64).expect("in a page");
        let stored = &state.pages[&offset];
        let other = (offset + PAGE as u64, offset.wrapping_sub(PAGE as u64));
        let other = [other.0, other.1].map(|at| state.pages.get(&at));
        match forgery {
            Forgery::None => return,
            Forgery::FlippedBit => page[place] ^= 1 << (number >> 13 & 7),
            Forgery::OtherPage => match other.into_iter().flatten().next() {
                Some(other) => *page = *other.now,
                None => return,
            },
            Forgery::OtherVm => match self.foreign.get(&offset) {
                Some(other) => *page = **other,
                None => return,
            },
            Forgery::OldVersion => match &stored.before {
                Some(before) => *page = **before,
                None => return,
            },
            Forgery::Torn => match &stored.before {
                Some(before) => page[place..].copy_from_slice(&before[place..]),
                None => return,
            },
        }
        if *page == *stored.now {
            return;
        }
        state.forged.insert(offset);
        state.forgeries += 1;
    }
}
