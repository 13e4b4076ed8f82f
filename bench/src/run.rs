//! A benchmark from flags to report: ask the server what it serves, make the dataset, warm up, send, count, print.
//!
//! The only module that prints. Everything that computes stands elsewhere; [`dispatch`] keeps the schedule and
//! [`conversation`] sends the turns.

pub mod conversation;
pub mod dispatch;
pub mod rehearsal;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;

use crate::args::ServeArgs;
use crate::body::BodyWriter;
use crate::client::Client;
use crate::dataset::{self, Dataset};
use crate::overhead::machine::raise_open_files;
use crate::record::RequestRecord;
use crate::report::{self, Settings, Summary, json, notes, vllm};
use crate::statistics::Statistics;
use crate::tokens::TokenCounter;
use crate::{arrivals, client};
use conversation::Workload;
use rehearsal::Rehearsal;

/// Tasks that run between two looks at the sockets: few, so that what has come is not left lying.
const EVENT_INTERVAL: u32 = 16;
/// Arrivals draw from their own stream, so that another dataset does not shift the schedule.
const ARRIVALS_STREAM: u64 = 0x6172_7269_7661_6c73;

/// Runs `bench serve`: measures, prints the table and the notes, appends the JSON line.
///
/// # Errors
/// Flags that make no sense, a server that is not there, files that cannot be read or written. Failed requests are
/// no error but part of the result.
pub fn serve(args: &ServeArgs) -> anyhow::Result<Summary> {
    let (summary, records) = measure(args)?;
    print!("\n{}", report::table(&summary));
    print!("{}", notes::notes(&summary));
    append_json_line(args, &summary, &records)?;
    Ok(summary)
}

/// Measures without printing the result.
///
/// # Errors
/// As [`serve`].
pub fn measure(args: &ServeArgs) -> anyhow::Result<(Summary, Vec<RequestRecord>)> {
    args.validate()?;
    raise_open_files(); // a stream is a connection
    let counter = TokenCounter::load(args.target.tokenizer.as_deref()).context("--tokenizer")?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().event_interval(EVENT_INTERVAL).build()?;
    let (model, num_prompts, finished) = runtime.block_on(drive(args, &counter))?;
    let dispatch::Finished { mut records, duration, client_cpu } = finished;
    if matches!(counter, TokenCounter::Exact(_)) {
        for record in &mut records {
            record.retokenized_tokens = counter.count(&record.response.text).ok(); // printed as n/a
        }
    }
    let statistics = Statistics::of(&records, duration, counter.dataset_count(), args.goodput());
    let client_cpu = Some(client_cpu);
    Ok((Summary { settings: settings(args, model, num_prompts), statistics, client_cpu }, records))
}

async fn drive(
    args: &ServeArgs,
    counter: &TokenCounter,
) -> anyhow::Result<(String, usize, dispatch::Finished)> {
    let client = Client::new(args).await?;
    let model = match &args.target.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let dataset = dataset::load(args, counter)?;
    announce(&dataset);
    let num_prompts = dataset.conversations.len();
    let rehearsal = Rehearsal::of(&dataset, args, counter)?;
    let progress = progress_bar(args, &dataset);
    let workload = Arc::new(Workload {
        client,
        writer: BodyWriter::new(args, &model),
        api: args.target.backend.api(),
        dataset,
        turn_delay: Duration::from_millis(args.dataset.turn_delay_ms),
        sends_session_id: args.request.send_session_id,
        progress,
    });
    warm_up(args, &workload, &rehearsal).await?;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(args.traffic.seed ^ ARRIVALS_STREAM);
    let recorded = &workload.dataset.arrivals;
    let schedule = arrivals::schedule(&args.arrivals(), num_prompts, recorded, &mut rng)?;
    let finished = dispatch::run(&workload, &schedule, args.traffic.max_concurrency).await?;
    workload.progress.finish_and_clear();
    Ok((model, num_prompts, finished))
}

async fn first_model(client: &client::Client) -> anyhow::Result<String> {
    let models =
        client.models().await.context("cannot ask the server for its models (or give --model NAME)")?;
    models.into_iter().next().context("the server lists no model; give one with --model NAME")
}

fn announce(dataset: &Dataset) {
    let input: u64 = dataset.conversations.iter().map(dataset::Conversation::input_tokens).sum();
    let turns = || dataset.conversations.iter().flat_map(|conversation| &conversation.turns);
    let output: u64 = turns().filter_map(|turn| turn.output_tokens).sum();
    println!("#Input tokens: {input}");
    println!("#Output tokens: {output}");
    if turns().count() > dataset.conversations.len() {
        println!("#Requests: {} in {} conversations", turns().count(), dataset.conversations.len());
    }
    for note in &dataset.notes {
        println!("note: {note}");
    }
}

fn progress_bar(args: &ServeArgs, dataset: &Dataset) -> ProgressBar {
    if args.report.disable_tqdm {
        return ProgressBar::hidden();
    }
    let requests: usize = dataset.conversations.iter().map(|conversation| conversation.turns.len()).sum();
    let template = "{percent:>3}%|{bar:40}| {pos}/{len} [{elapsed_precise}<{eta_precise}, {per_sec}]";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(requests as u64).with_style(style)
}

async fn warm_up(args: &ServeArgs, workload: &Arc<Workload>, rehearsal: &Rehearsal) -> anyhow::Result<()> {
    let count = args.traffic.warmup_requests;
    if count > 0 {
        println!("Starting warmup with {count} sequences...");
        if let Some(failure) = rehearsal.send(workload, count).await {
            bail!("every warm-up request failed, the last with: {failure}");
        }
        println!("Warmup completed with {count} sequences. Starting main benchmark run...");
    }
    if args.traffic.flush_cache {
        workload.client.flush_cache().await.context("--flush-cache")?;
    }
    Ok(())
}

fn settings(args: &ServeArgs, model: String, num_prompts: usize) -> Settings {
    let report = &args.report;
    Settings {
        style: report.style,
        backend: args.target.backend.name(),
        dataset_name: args.dataset.dataset_name.name(),
        model,
        tokenizer: args.target.tokenizer.as_ref().map(|path| path.display().to_string()),
        num_prompts,
        arrivals: args.arrivals(),
        max_concurrency: args.traffic.max_concurrency,
        random_input_tokens: args.dataset.random_input_len,
        random_output_tokens: args.dataset.random_output_len,
        random_range_ratio: args.dataset.random_range_ratio,
        sharegpt_output_tokens: args.dataset.sharegpt_output_len,
        percentile_metrics: report.percentile_metrics.clone().unwrap_or(vllm::DEFAULT_METRICS.to_vec()),
        metric_percentiles: report.metric_percentiles.clone().unwrap_or(vllm::DEFAULT_PERCENTILES.to_vec()),
        tag: report.tag.clone(),
    }
}

/// Appends the result to `--output-file`, if there is one.
///
/// # Errors
/// A file that cannot be written.
pub fn append_json_line(
    args: &ServeArgs,
    summary: &Summary,
    records: &[RequestRecord],
) -> anyhow::Result<()> {
    let Some(path) = &args.report.output_file else {
        return Ok(());
    };
    let mut object = json::result(summary, SystemTime::now());
    if args.report.output_details {
        object.extend(json::details(records));
    }
    let line = serde_json::to_string(&object)? + "\n";
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    written.with_context(|| format!("cannot append to --output-file {}", path.display()))
}
